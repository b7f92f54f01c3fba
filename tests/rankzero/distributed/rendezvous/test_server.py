import contextlib
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.distributed import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous import server
from rankzero.distributed.rendezvous.errors import GREETING
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.server import (
    Progress,
    RendezvousServer,
    listen_for_ranks,
    listening_address,
    reject_clients,
)
from rankzero.messages import RequestError, Stopped
from running import reserved_port

REFUSAL = RequestError("asked", "found", "instead")
UNKNOWN = b'{"rank": 1, "local_rank": 1, "node_rank": 0, "world_size": 2, "host": "a", "pid": 1, "order": 0}\n'


def test_a_world_of_one_process_is_complete_at_once(rendezvous):
    world = rendezvous(1)
    assert world.members.result(10) == [world.this_peer]


@pytest.mark.parametrize("size", [2, 3])
def test_every_process_receives_the_list_of_all_members(rendezvous, size):
    world = rendezvous(size)
    clients = [world.call(world.member(rank)) for rank in range(1, size)]
    members = world.members.result(10)
    assert sorted(member.rank for member in members) == [*range(size)] and members[0] == world.this_peer
    assert all(client.greeting == f'{GREETING} "k"\n'.encode() for client in clients)
    for client in clients:
        assert client.answer() == {"members": [member._asdict() for member in members]}
    socket.create_connection(("127.0.0.1", world.port)).close()  # torch's store uses the socket next


def test_a_line_may_arrive_in_pieces(rendezvous):
    world = rendezvous(2)
    line = json.dumps(world.member(1)).encode() + b"\n"
    client = world.call()
    client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(line), 40):
        client.send(line[start : start + 40])
        time.sleep(0.002)
    assert len(world.members.result(10)) == 2 and len(client.answer()["members"]) == 2


def test_unrelated_clients_do_not_disturb_the_rendezvous(rendezvous):
    world, generator = rendezvous(2), random.Random(0)
    for _ in range(50):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", world.port), timeout=2) as unrelated_client,
        ):
            unrelated_client.sendall(generator.randbytes(generator.choice((0, 3, 5000))) + b"\n{}\n")
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


NESTED = b"[" * 3000 + b"\n"


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b"null\n", b"[1]\n", UNKNOWN, b"\xff\n", b"{", b"7\n", NESTED], ids=len
)
def test_a_malformed_line_admits_no_process(rendezvous, line):
    world = rendezvous(2)
    unrelated_client = world.call(line)
    world.call(world.member(1))
    assert [member.rank for member in world.members.result(10)] == [0, 1]
    assert "more processes" in unrelated_client.answer()["refused"][1]


def test_a_client_that_sends_too_long_a_line_is_disconnected(rendezvous, monkeypatch):
    monkeypatch.setattr(server, "MAX_LINE_BYTES", 1000)
    world = rendezvous(2)
    assert world.call(b"x" * 1001).answer() is None
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


def test_a_process_that_disconnects_while_waiting_is_missing(rendezvous):
    world = rendezvous(3)
    client = world.call(world.member(1))
    world.wait_for_members(2)
    client.close()
    world.wait_for_members(1)
    world.server.deadline = 0
    assert "missing ranks 1, 2;" in world.refused().found


def test_a_process_that_disconnects_may_connect_again(rendezvous):
    world = rendezvous(3)
    client = world.call(world.member(1))
    world.wait_for_members(2)
    client.close()
    world.wait_for_members(1)
    clients = [world.call(world.member(rank)) for rank in (1, 2)]
    assert len(world.members.result(10)) == 3
    assert all(len(client.answer()["members"]) == 3 for client in clients)


def test_processes_beyond_the_world_size_are_refused(rendezvous):
    world = rendezvous(2)
    late = world.call()
    world.call(world.member(1))
    world.members.result(10)
    assert late.answer() == {"refused": ["a world of 2", "more processes than that", "fewer of them"]}


def test_all_processes_are_refused_if_the_world_sizes_differ(rendezvous):
    world = rendezvous(3)
    clients = [world.call(world.member(1))]
    world.wait_for_members(2)
    clients.append(world.call(world.member(2, world_size=8, host="b")))
    error = world.refused()
    assert error.asked == f"a world of 3 (rank 0 on {world.this_peer.host})"
    assert error.found == "rank 2 on b expects 8"
    assert all(client.answer() == {"refused": [*error.args]} for client in clients)
    assert world.listener.fileno() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_the_same_rank_are_both_named(rendezvous, rank):
    world = rendezvous(4)
    existing = world.this_peer
    if rank:
        world.call(world.member(rank, host="b", pid=8))
        world.wait_for_members(2)
        existing = world.this_peer._replace(host="b", pid=8)
    client = world.call(world.member(rank, host="c", pid=9))
    error = world.refused()
    assert error.asked == f"one process with rank {rank}"
    assert error.found == f"two: process {existing.pid} on {existing.host} and process 9 on c"
    assert client.answer() == {"refused": [*error.args]}


def test_several_tasks_without_ranks_are_no_duplicates(rendezvous):
    world = rendezvous(3)
    for _ in range(2):
        world.call(world.member(None))
    assert [member.rank for member in world.members.result(10)] == [0, None, None]


def test_at_the_deadline_all_processes_receive_the_missing_ranks(rendezvous):
    world = rendezvous(4)
    clients = [world.call(world.member(rank)) for rank in (1, 3)]
    world.wait_for_members(3)
    world.server.deadline = 0
    error = world.refused()
    assert error.found.startswith("missing rank 2;") and "within 10 s" in error.asked
    assert all(client.answer() == {"refused": [*error.args]} for client in clients)


@pytest.mark.parametrize(("size", "seconds"), [(2, 10.0), (3, 0.3)], ids=["complete", "at the deadline"])
def test_a_given_refusal_is_sent_instead_of_the_members(rendezvous, size, seconds):
    world = rendezvous(size, seconds=seconds, refusal=REFUSAL)
    client = world.call(world.member(1))
    assert world.refused() is REFUSAL
    assert client.answer() == {"refused": ["asked", "found", "instead"]}


def test_a_stop_signal_ends_the_wait(rendezvous, monkeypatch):
    monkeypatch.setattr(SIGNALS, "received", "SIGTERM")
    monkeypatch.setattr(SIGNALS, "received_at", time.monotonic() - 3600)
    with pytest.raises(Stopped, match="SIGTERM"):
        rendezvous(2).members.result(10)


def listen(port, **fields):
    return listen_for_ranks(
        Launch(**{"launcher": "env", "world_size": 2, "local_world_size": 2, "port": port, **fields}), None
    )


def test_rank_zero_listens_on_the_rendezvous_address():
    with reserved_port() as port, listen(port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        assert listen(port) is None  # the port is in use, so a second process connects to it


def test_an_inherited_socket_is_used():
    with network.listen("127.0.0.1", 0) as inherited, listen(1, listening_fd=inherited.fileno()) as listener:
        assert listener.getsockname() == inherited.getsockname()
        inherited.detach()


def test_a_port_without_permission_to_listen_is_refused(monkeypatch):
    def refuse(ip, number):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(server.network, "listen", refuse)
    with pytest.raises(RequestError) as caught:
        listen(80)
    assert "port 80" in caught.value.asked and caught.value.found == "Permission denied"


@pytest.fixture
def other_machine(monkeypatch):
    """Makes every address belong to another machine, or to a container's host."""
    monkeypatch.setattr(network, "is_local_address", lambda ip: False)


def test_a_forwarded_port_is_accepted(other_machine):
    with reserved_port() as port, listen(port, address="127.0.0.1") as listener:
        assert listener.getsockname() == ("0.0.0.0", port)


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_the_address_of_another_machine_is_refused(other_machine, monkeypatch, hosts):
    def unreachable(address, timeout):
        raise OSError(113, "No route to host")

    refusals = []
    monkeypatch.setattr(RendezvousServer, "wait", lambda rendezvous_server, refusal: refusals.append(refusal))
    monkeypatch.setattr(server.socket, "create_connection", unreachable)
    with reserved_port() as port:
        with pytest.raises(RequestError, match="another machine or does not exist") as caught:
            listen(port, address="192.0.2.1", hosts=hosts)
        network.listen("127.0.0.1", port).close()
    assert refusals == ([caught.value] if hosts else [])  # the other ranks connect to the first host next


SEVERAL = {"num_nodes": 2, "local_world_size": 1}


@pytest.mark.parametrize(
    ("launch", "own_addresses", "interface", "expected"),
    [
        ({}, ["127.0.1.1"], None, "127.0.1.1"),
        (SEVERAL, ["127.0.1.1"], None, ""),
        (SEVERAL, ["10.0.0.1"], None, "10.0.0.1"),
        (SEVERAL | {"address": "127.0.0.1"}, ["10.0.0.1"], "lo", "127.0.0.1"),
        (SEVERAL | {"address": "localhost"}, ["127.0.0.1"], None, "127.0.0.1"),
        (SEVERAL, ["10.0.0.1", "10.0.0.2"], None, ""),
        (SEVERAL, ["127.0.1.1", "10.0.0.1"], None, ""),
        (SEVERAL, [], None, ""),
        (SEVERAL | {"launcher": "pbs"}, ["10.0.0.1"], None, ""),
        ({"launcher": "pbs"}, ["10.0.0.1"], None, "10.0.0.1"),
    ],
)
def test_rank_zero_listens_on_one_address_only_if_it_is_unambiguous(
    monkeypatch, launch, own_addresses, interface, expected
):
    for name in (network.GLOO, network.NCCL):
        monkeypatch.setenv(name, "")
    fields = {"launcher": "env", "world_size": 2, "local_world_size": 2, "address": "x", **launch}
    assert listening_address(Launch(**fields), own_addresses, interface) == expected


def test_processes_that_connect_to_the_wrong_machine_receive_the_error(monkeypatch, call):
    monkeypatch.setattr(server, "REJECT_SECONDS", 0.5)
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        launch = Launch(launcher="env", rank=1, world_size=3, port=port, world_id="k")
        rejecting = pool.submit(reject_clients, launch, ["127.0.0.1"], REFUSAL)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                client = call(port)
                break
        client.send(Peer.this(launch._replace(rank=2))._asdict())
        assert client.answer() == {"refused": ["asked", "found", "instead"]}
        assert rejecting.result(10) is None
        with network.listen("127.0.0.1", port):
            assert reject_clients(launch, ["127.0.0.1"], REFUSAL) is None  # another local rank rejects clients


def test_progress_is_printed_at_intervals(monkeypatch, capsys):
    progress = Progress(20)
    progress.print_if_due(lambda: pytest.fail("it is too early"))
    monkeypatch.setattr(server, "PROGRESS_SECONDS", -1)
    progress.print_if_due(lambda: "missing rank 1")
    monkeypatch.setattr(server, "PROGRESS_SECONDS", 10)
    progress.print_if_due(lambda: pytest.fail("it is too early again"))
    assert capsys.readouterr().err.startswith("rankzero: waiting: missing rank 1; ")
