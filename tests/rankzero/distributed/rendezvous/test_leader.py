import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_server import LineServer
from rankzero.distributed.connections.local_socket import connect_locally
from rankzero.distributed.rendezvous import leader
from rankzero.distributed.rendezvous.leader import leader_name, listen_as_leader, uses_leader
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from running import on_each_rank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leaders exist on Linux only")


@pytest.fixture
def launches(launches):
    """The launches of two nodes with three processes each."""
    return launches(6)


@pytest.fixture
def accepted(monkeypatch):
    """Counts the connections that each server accepts."""
    counts = {}
    greet = LineServer._greet

    def counting_greet(server, client):
        key = "local" if client.family != 2 else "network"
        counts[key] = counts.get(key, 0) + 1
        greet(server, client)

    monkeypatch.setattr(LineServer, "_greet", counting_greet)
    return counts


def test_every_process_receives_all_members_over_one_network_connection_per_other_node(launches, join, accepted):
    results = on_each_rank(launches, join)
    assert [result.launch.rank for result in results] == [*range(6)]
    assert [result.launch.local_rank for result in results] == [0, 1, 2, 0, 1, 2]
    assert [result.launch.processes_per_node for result in results] == [(3, 3)] * 6
    assert [[*result.peers] for result in results] == [[*range(6)]] * 6
    assert [bool(result.listener) for result in results] == [True, False, False, False, False, False]
    assert accepted == {"network": 1, "local": 4}
    assert {result.address for result in results} == {"127.0.0.1"}


def test_processes_without_a_leader_connect_themselves(launches, join, accepted, monkeypatch):
    monkeypatch.setattr(TIMERS, "leader", 0.3)
    monkeypatch.setattr(leader, "listen_locally", lambda name: None)
    assert [result.launch.rank for result in on_each_rank(launches, join)] == [*range(6)]
    assert accepted == {"network": 5}


def test_a_refusal_reaches_all_processes_of_all_nodes(launches, join, scale_timers):
    scale_timers(0.5)
    launches[4] = launches[4]._replace(world_size=9)
    errors = on_each_rank(launches, join)
    assert all("rank 4 on " in error.found and "expects 9" in error.found for error in errors)
    assert [bool(error.reported_elsewhere) for error in errors] == [False] + [True] * 5


@pytest.mark.parametrize("factor", [0.5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("late", [1, 5])
def test_a_refusal_reaches_a_process_that_connects_later(launches, join, late, scale_timers, factor):
    """One on rank zero's node, and one on the node of the wrong process."""
    scale_timers(factor)
    launches[4] = launches[4]._replace(world_size=9)
    with ThreadPoolExecutor(6) as pool:
        present = [pool.submit(join, launch) for launch in launches if launch.rank != late]
        time.sleep(TIMERS.refuse / 3)
        errors = [join(launches[late]), *[future.result() for future in present]]
    assert all("expects 9" in error.found for error in errors)


def test_a_process_that_disconnects_from_its_leader_is_missing(launches, join, scale_timers):
    scale_timers(0.1)
    with ThreadPoolExecutor(6) as pool:
        present = [pool.submit(join, launch, 1) for launch in (*launches[:4], launches[5])]
        while (connection := connect_locally(leader_name(launches[4]))) is None:
            time.sleep(0.01)
        connection.close()
        errors = [future.result() for future in present]
    assert all("missing rank 4;" in error.found for error in errors)
    assert [error.reported_elsewhere for error in errors] == [None, *[True] * 4]  # rank zero reports the error


def test_the_error_of_a_leader_reaches_its_node(launches, join, no_route, monkeypatch):
    monkeypatch.setattr(TIMERS, "first_answer", 0.3)
    errors = on_each_rank(launches[3:], join)
    assert all("does not answer" in error.found for error in errors)
    assert [bool(error.reported_elsewhere) for error in errors] == [False, True, True]


def test_only_the_first_process_of_a_node_is_its_leader_if_a_leader_is_needed(launches):
    with listen_as_leader(launches[3]):
        assert listen_as_leader(launches[3]) is None and listen_as_leader(launches[4]) is None
    unnumbered = launches[3]._replace(local_rank=None)
    with listen_as_leader(unnumbered):
        assert listen_as_leader(unnumbered) is None
    assert uses_leader(launches[0])
    assert not uses_leader(launches[0]._replace(local_world_size=1))
    assert not uses_leader(launches[0]._replace(num_nodes=1))


@pytest.mark.parametrize("rank", [2, 5])
def test_containers_of_one_machine_with_different_keys_are_not_authenticated(launches, join, monkeypatch, rank):
    keys = dict.fromkeys(range(6), Key(b"k" * 32, "the file")) | {rank: Key(b"o" * 32, "another home")}
    this = Peer.this
    monkeypatch.setattr(Peer, "this", classmethod(lambda cls, launch, key=None: this(launch, keys[launch.rank])))
    results = on_each_rank(launches, join)
    assert all(f"than rank {rank} on " in result.key_problem for result in results)
    assert all(peer.key_fingerprint == "" for result in results for peer in result.peers.values())
