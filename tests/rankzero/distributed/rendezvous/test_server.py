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
from rankzero.distributed.rendezvous import server as module
from rankzero.distributed.rendezvous.errors import GREETING
from rankzero.distributed.rendezvous.peers import Peer
from rankzero.distributed.rendezvous.server import (
    Progress,
    RendezvousServer,
    listen_for_ranks,
    reject_callers,
    where_to_listen,
)
from rankzero.messages import RequestError, Stopped
from running import reserved_port

REFUSAL = RequestError("asked", "found", "instead")
UNKNOWN = b'{"rank": 1, "local_rank": 1, "node_rank": 0, "world_size": 2, "host": "a", "pid": 1, "order": 0}\n'


def test_a_world_of_one_process_is_complete_at_once(rendezvous):
    one = rendezvous(1)
    assert one.members.result(10) == [one.me]


@pytest.mark.parametrize("size", [2, 3])
def test_every_process_receives_the_list_of_all_members(rendezvous, size):
    world = rendezvous(size)
    callers = [world.call(world.member(rank)) for rank in range(1, size)]
    members = world.members.result(10)
    assert sorted(member.rank for member in members) == [*range(size)] and members[0] == world.me
    assert all(caller.greeting == f'{GREETING} "k"\n'.encode() for caller in callers)
    for caller in callers:
        assert caller.answer() == {"members": [member._asdict() for member in members]}
    socket.create_connection(("127.0.0.1", world.port)).close()  # torch's store uses the socket next


def test_a_line_may_arrive_in_pieces(rendezvous):
    world = rendezvous(2)
    line = json.dumps(world.member(1)).encode() + b"\n"
    caller = world.call()
    caller.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(line), 40):
        caller.send(line[start : start + 40])
        time.sleep(0.002)
    assert len(world.members.result(10)) == 2 and len(caller.answer()["members"]) == 2


def test_unrelated_clients_do_not_disturb_the_rendezvous(rendezvous):
    world, generator = rendezvous(2), random.Random(0)
    for _ in range(50):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", world.port), timeout=2) as stranger,
        ):
            stranger.sendall(generator.randbytes(generator.choice((0, 3, 5000))) + b"\n{}\n")
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


NESTED = b"[" * 3000 + b"\n"


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b"null\n", b"[1]\n", UNKNOWN, b"\xff\n", b"{", b"7\n", NESTED], ids=len
)
def test_a_malformed_line_admits_no_process(rendezvous, line):
    world = rendezvous(2)
    stranger = world.call(line)
    world.call(world.member(1))
    assert [member.rank for member in world.members.result(10)] == [0, 1]
    assert "more processes" in stranger.answer()["refused"][1]


def test_a_client_that_sends_too_long_a_line_is_disconnected(rendezvous, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    world = rendezvous(2)
    assert world.call(b"x" * 1001).answer() is None
    world.call(world.member(1))
    assert len(world.members.result(10)) == 2


def test_a_process_that_disconnects_while_waiting_is_missing(rendezvous):
    world = rendezvous(3)
    caller = world.call(world.member(1))
    world.wait_until_there_are(2)
    caller.close()
    world.wait_until_there_are(1)
    world.server.deadline = 0
    assert "missing ranks 1, 2;" in world.refused().found


def test_a_process_that_disconnects_may_connect_again(rendezvous):
    world = rendezvous(3)
    caller = world.call(world.member(1))
    world.wait_until_there_are(2)
    caller.close()
    world.wait_until_there_are(1)
    callers = [world.call(world.member(rank)) for rank in (1, 2)]
    assert len(world.members.result(10)) == 3
    assert all(len(caller.answer()["members"]) == 3 for caller in callers)


def test_processes_beyond_the_world_size_are_refused(rendezvous):
    world = rendezvous(2)
    late = world.call()
    world.call(world.member(1))
    world.members.result(10)
    assert late.answer() == {"refused": ["a world of 2", "more processes than that", "fewer of them"]}


def test_all_processes_are_refused_if_the_world_sizes_differ(rendezvous):
    world = rendezvous(3)
    callers = [world.call(world.member(1))]
    world.wait_until_there_are(2)
    callers.append(world.call(world.member(2, world_size=8, host="b")))
    error = world.refused()
    assert error.asked == f"a world of 3 (rank 0 on {world.me.host})"
    assert error.found == "rank 2 on b was told of 8"
    assert all(caller.answer() == {"refused": [*error.args]} for caller in callers)
    assert world.listening.fileno() == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_with_the_same_rank_are_both_named(rendezvous, rank):
    world = rendezvous(4)
    other = world.me
    if rank:
        world.call(world.member(rank, host="b", pid=8))
        world.wait_until_there_are(2)
        other = world.me._replace(host="b", pid=8)
    caller = world.call(world.member(rank, host="c", pid=9))
    error = world.refused()
    assert error.asked == f"one process of rank {rank}"
    assert error.found == f"two: process {other.pid} on {other.host} and process 9 on c"
    assert caller.answer() == {"refused": [*error.args]}


def test_several_tasks_without_ranks_are_no_duplicates(rendezvous):
    world = rendezvous(3)
    for _ in range(2):
        world.call(world.member(None))
    assert [member.rank for member in world.members.result(10)] == [0, None, None]


def test_at_the_deadline_all_processes_receive_the_missing_ranks(rendezvous):
    world = rendezvous(4)
    callers = [world.call(world.member(rank)) for rank in (1, 3)]
    world.wait_until_there_are(3)
    world.server.deadline = 0
    error = world.refused()
    assert error.found.startswith("missing rank 2;") and "within 10 s" in error.asked
    assert all(caller.answer() == {"refused": [*error.args]} for caller in callers)


@pytest.mark.parametrize(("size", "seconds"), [(2, 10.0), (3, 0.3)], ids=["complete", "at the deadline"])
def test_a_given_refusal_is_sent_instead_of_the_members(rendezvous, size, seconds):
    world = rendezvous(size, seconds=seconds, refusal=REFUSAL)
    caller = world.call(world.member(1))
    assert world.refused() is REFUSAL
    assert caller.answer() == {"refused": ["asked", "found", "instead"]}


def test_a_stop_signal_ends_the_wait(rendezvous, monkeypatch):
    monkeypatch.setattr(SIGNALS, "asked", "SIGTERM")
    monkeypatch.setattr(SIGNALS, "asked_at", time.monotonic() - 3600)
    with pytest.raises(Stopped, match="SIGTERM"):
        rendezvous(2).members.result(10)


def listen(port, **more):
    return listen_for_ranks(
        Launch(**{"launcher": "env", "world_size": 2, "local_world_size": 2, "port": port, **more}), None
    )


def test_rank_zero_listens_on_the_rendezvous_address():
    with reserved_port() as port, listen(port) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        assert listen(port) is None  # the port is in use, so a second process connects to it


def test_an_inherited_socket_is_used():
    with network.listen("127.0.0.1", 0) as inherited, listen(1, listening=inherited.fileno()) as listening:
        assert listening.getsockname() == inherited.getsockname()
        inherited.detach()


def test_a_port_without_permission_to_listen_is_refused(monkeypatch):
    def refuse(ip, number):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.network, "listen", refuse)
    with pytest.raises(RequestError) as caught:
        listen(80)
    assert "port 80" in caught.value.asked and caught.value.found == "Permission denied"


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes every address belong to another machine, or to a container's host."""
    monkeypatch.setattr(network, "is_mine", lambda ip: False)


def test_a_forwarded_port_is_accepted(elsewhere):
    with reserved_port() as port, listen(port, address="127.0.0.1") as listening:
        assert listening.getsockname() == ("0.0.0.0", port)


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_the_address_of_another_machine_is_refused(elsewhere, monkeypatch, hosts):
    def unreachable(address, timeout):
        raise OSError(113, "No route to host")

    called = []
    monkeypatch.setattr(RendezvousServer, "wait", lambda server, refusal: called.append(refusal))
    monkeypatch.setattr(module.socket, "create_connection", unreachable)
    with reserved_port() as port:
        with pytest.raises(RequestError, match="another machine or none") as caught:
            listen(port, address="192.0.2.1", hosts=hosts)
        network.listen("127.0.0.1", port).close()
    assert called == ([caught.value] if hosts else [])  # the other ranks connect to the first host next


SEVERAL = {"num_nodes": 2, "local_world_size": 1}


@pytest.mark.parametrize(
    ("launch", "own", "interface", "where"),
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
def test_rank_zero_listens_on_one_address_only_if_it_is_unambiguous(monkeypatch, launch, own, interface, where):
    for name in (network.GLOO, network.NCCL):
        monkeypatch.setenv(name, "")
    whole = {"launcher": "env", "world_size": 2, "local_world_size": 2, "address": "x", **launch}
    assert where_to_listen(Launch(**whole), own, interface) == where


def test_processes_that_connect_to_the_wrong_machine_receive_the_error(monkeypatch, call):
    monkeypatch.setattr(module, "TURN_AWAY_SECONDS", 0.5)
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        launch = Launch(launcher="env", rank=1, world_size=3, port=port, world_id="k")
        rejecting = pool.submit(reject_callers, launch, ["127.0.0.1"], REFUSAL)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                caller = call(port)
                break
        caller.send(Peer.this(launch._replace(rank=2))._asdict())
        assert caller.answer() == {"refused": ["asked", "found", "instead"]}
        assert rejecting.result(10) is None
        with network.listen("127.0.0.1", port):
            assert reject_callers(launch, ["127.0.0.1"], REFUSAL) is None  # another local rank rejects callers


def test_progress_is_printed_at_intervals(monkeypatch, capsys):
    progress = Progress(20)
    progress.print_if_due(lambda: pytest.fail("it is too early"))
    monkeypatch.setattr(module, "PROGRESS_SECONDS", -1)
    progress.print_if_due(lambda: "missing rank 1")
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 10)
    progress.print_if_due(lambda: pytest.fail("it is too early again"))
    assert capsys.readouterr().err.startswith("rankzero: waiting: missing rank 1; ")
