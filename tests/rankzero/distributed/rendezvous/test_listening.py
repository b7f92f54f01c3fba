import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous import listening
from rankzero.distributed.rendezvous.listening import listen_for_ranks, listening_address, reject_clients
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError
from running import refusal_of, reserved_port

KEY = Key(b"k" * 32, "the tests")
REFUSAL = RequestError("asked", "found", "instead")
SEVERAL = {"num_nodes": 2, "local_world_size": 1}


def listen(port, **fields):
    place = {"launcher": "env", "world_size": 2, "local_world_size": 2, "port": port}
    return listen_for_ranks(Launch(**{**place, **fields}), None, KEY, deadline=0)


def test_rank_zero_listens_on_the_rendezvous_address_or_an_inherited_socket():
    with reserved_port() as port, listen(port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        assert listen(port) is None  # the port is in use, so a second process connects to it
    with network.listen("127.0.0.1", 0) as inherited, listen(1, listening_fd=inherited.fileno()) as listener:
        assert listener.getsockname() == inherited.getsockname()
        inherited.detach()


def test_a_port_without_permission_to_listen_is_refused(monkeypatch):
    monkeypatch.setattr(network, "listen", Mock(side_effect=PermissionError(13, "Permission denied")))
    error = refusal_of(listen, 80)
    assert "port 80" in error.asked and error.found == "Permission denied"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_is_resolved_again_until_the_deadline_unless_a_scheduler_lists_the_hosts(monkeypatch, capsys, rank):
    unresolved = RequestError("asked", "'a' does not resolve", "instead")
    resolve = Mock(side_effect=[unresolved, unresolved, ["10.0.0.1"], unresolved, unresolved])
    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(TIMERS, "slow_poll", 0.01)
    monkeypatch.setattr(TIMERS, "progress", 0.0)
    launch, deadline = Launch(launcher="env", world_size=2, local_rank=rank, address="a"), time.monotonic() + 60
    assert listening.resolve_address(launch, deadline) == ["10.0.0.1"]
    assert ("'a' does not resolve; giving up in 60 s" in capsys.readouterr().err) == (rank == 0)
    assert refusal_of(listening.resolve_address, launch, 0) is unresolved
    assert refusal_of(listening.resolve_address, launch._replace(hosts=("a", "b")), deadline) is unresolved


@pytest.mark.parametrize("hosts", [(), ("a", "b")])
def test_the_address_of_another_machine_is_refused_unless_it_forwards_the_port(monkeypatch, hosts, request):
    refusals = []
    monkeypatch.setattr(RendezvousServer, "wait", lambda rendezvous_server, refusal: refusals.append(refusal))
    monkeypatch.setattr(network, "is_local_address", lambda ip: False)
    with reserved_port() as port, listen(port, address="127.0.0.1") as listener:
        assert listener.getsockname() == ("0.0.0.0", port)
    request.getfixturevalue("no_route")
    with reserved_port() as port:
        with pytest.raises(RequestError, match="another machine or does not exist") as caught:
            listen(port, address="192.0.2.1", hosts=hosts)
        network.listen("127.0.0.1", port).close()
    assert refusals == ([caught.value] if hosts else [])  # the other ranks connect to the first host next


def test_rank_zero_listens_on_one_unambiguous_address(monkeypatch):
    for launch, own_addresses, interface, expected in (
        *[({}, ["127.0.1.1"], None, "127.0.1.1"), ({"launcher": "pbs"}, ["10.0.0.1"], None, "10.0.0.1")],
        *[(SEVERAL, ["127.0.1.1"], None, ""), (SEVERAL, ["10.0.0.1"], None, "10.0.0.1"), (SEVERAL, [], None, "")],
        (SEVERAL | {"address": "127.0.0.1"}, ["10.0.0.1"], "lo", "127.0.0.1"),
        (SEVERAL | {"address": "localhost"}, ["127.0.0.1"], None, "127.0.0.1"),
        *[(SEVERAL, ["10.0.0.1", "10.0.0.2"], None, ""), (SEVERAL, ["127.0.1.1", "10.0.0.1"], None, "")],
        (SEVERAL | {"launcher": "pbs"}, ["10.0.0.1"], None, ""),
    ):
        for name in (network.GLOO, network.NCCL):
            monkeypatch.setenv(name, "")
        fields = {"launcher": "env", "world_size": 2, "local_world_size": 2, "address": "x", **launch}
        assert listening_address(Launch(**fields), own_addresses, interface) == expected


def test_processes_that_connect_to_the_wrong_machine_receive_the_error(scale_timers, call):
    scale_timers(0.25)
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        launch = Launch(launcher="env", rank=1, world_size=3, port=port, world_id="k")
        rejecting = pool.submit(reject_clients, launch, ["127.0.0.1"], REFUSAL, KEY)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                client = call(port)
                break
        client.send({"peer": Peer.this(launch._replace(rank=2))._asdict()})
        assert client.answer() == {"refused": ["asked", "found", "instead"]}
        assert rejecting.result(10) is None
        with network.listen("127.0.0.1", port):
            assert reject_clients(launch, ["127.0.0.1"], REFUSAL, KEY) is None  # another local rank rejects clients
