import contextlib
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, permutations

import pytest

from rankzero.distributed.connections.handshake import GREETING
from rankzero.distributed.connections.key import Key
from rankzero.distributed.connections.line_server import LineServer
from rankzero.distributed.connections.local_socket import connect_locally
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.rendezvous import client
from rankzero.distributed.rendezvous.client import leader_name, listen_as_leader, uses_leader
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.messages import AnotherRankFailed
from running import on_each_rank, wait_until


@pytest.fixture
def two_nodes(launches):
    """The launches of two nodes with three processes each, which connect through leaders."""
    if sys.platform != "linux":
        pytest.skip("leaders exist on Linux only")
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


def test_every_process_receives_all_members_over_one_network_connection_per_other_node(two_nodes, join, accepted):
    results = on_each_rank(two_nodes, join)
    assert [result.launch.rank for result in results] == [*range(6)]
    assert [result.launch.local_rank for result in results] == [0, 1, 2, 0, 1, 2]
    assert [result.launch.processes_per_node for result in results] == [(3, 3)] * 6
    assert [[*result.peers] for result in results] == [[*range(6)]] * 6
    assert [bool(result.link.listener) for result in results] == [True, False, False, False, False, False]
    assert accepted == {"network": 1, "local": 4}
    assert {result.address for result in results} == {"127.0.0.1"}


def test_processes_without_a_leader_connect_themselves(two_nodes, join, accepted, monkeypatch):
    monkeypatch.setattr(TIMERS, "leader", 0.3)
    monkeypatch.setattr(client, "listen_locally", lambda name: None)
    assert [result.launch.rank for result in on_each_rank(two_nodes, join)] == [*range(6)]
    assert accepted == {"network": 5}


@pytest.mark.parametrize("factor", [0.5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("late", [1, 5])
def test_a_refusal_reaches_all_processes_of_all_nodes_also_a_late_one(two_nodes, join, late, scale_timers, factor):
    """One on rank zero's node, and one on the node of the wrong process."""
    scale_timers(factor)
    two_nodes[4] = two_nodes[4]._replace(world_size=9)
    with ThreadPoolExecutor(6) as pool:
        present = [pool.submit(join, launch) for launch in two_nodes if launch.rank != late]
        time.sleep(TIMERS.refuse / 3)
        last = join(two_nodes[late])
    errors = [*(future.result() for future in present), last]
    assert all("rank 4 on " in error.found and "expects 9" in error.found for error in errors)
    assert [bool(error.reported_elsewhere) for error in errors] == [False] + [True] * 5


def test_a_process_that_disconnects_from_its_leader_is_missing(two_nodes, join, scale_timers):
    scale_timers(0.1)
    with ThreadPoolExecutor(6) as pool:
        present = [pool.submit(join, launch, 1) for launch in (*two_nodes[:4], two_nodes[5])]
        while (connection := connect_locally(leader_name(two_nodes[4]))) is None:
            time.sleep(0.01)
        connection.close()
        errors = [future.result() for future in present]
    assert all("missing rank 4;" in error.found for error in errors)
    assert [error.reported_elsewhere for error in errors] == [None, *[True] * 4]  # rank zero reports the error


def test_the_error_of_a_leader_reaches_its_node(two_nodes, join, no_route, monkeypatch):
    monkeypatch.setattr(TIMERS, "first_answer", 0.3)
    errors = on_each_rank(two_nodes[3:], join)
    assert all("does not answer" in error.found for error in errors)
    assert [bool(error.reported_elsewhere) for error in errors] == [False, True, True]


def test_only_the_first_process_of_a_node_is_its_leader_if_a_leader_is_needed(two_nodes):
    with listen_as_leader(two_nodes[3]):
        assert listen_as_leader(two_nodes[3]) is None and listen_as_leader(two_nodes[4]) is None
    unnumbered = two_nodes[3]._replace(local_rank=None)
    with listen_as_leader(unnumbered):
        assert listen_as_leader(unnumbered) is None
    assert uses_leader(two_nodes[0])
    assert not uses_leader(two_nodes[0]._replace(local_world_size=1))
    assert not uses_leader(two_nodes[0]._replace(num_nodes=1))


@pytest.mark.parametrize("rank", [2, 5])
def test_containers_of_one_machine_with_different_keys_are_not_authenticated(two_nodes, join, monkeypatch, rank):
    keys = dict.fromkeys(range(6), Key(b"k" * 32, "the file")) | {rank: Key(b"o" * 32, "another home")}
    this = Peer.this
    monkeypatch.setattr(Peer, "this", classmethod(lambda cls, launch, key=None: this(launch, keys[launch.rank])))
    results = on_each_rank(two_nodes, join)
    assert all(f"than rank {rank} on " in result.key_problem for result in results)
    assert all(peer.key_fingerprint == "" for result in results for peer in result.peers.values())


def test_a_leader_keeps_only_the_connections_of_its_ranks(two_nodes, join):
    with ThreadPoolExecutor(6) as pool, contextlib.ExitStack() as opened:
        waiting = [pool.submit(join, launch) for launch in two_nodes[3:]]
        wait_until(lambda: (stray := connect_locally(leader_name(two_nodes[4]))) and opened.enter_context(stray))
        time.sleep(0.1)  # the leader accepts it
        results = [*on_each_rank(two_nodes[:3], join), *(future.result() for future in waiting)]
        (link,) = [result.link for result in results if result.link.server]
        (leader,) = [result.link.node_leader for result in results if result.link.node_leader]
        assert [sorted(chain(*link.ranks.values())), sorted(leader._ranks.values())] == [[*range(6)], [3, 4, 5]]
        assert (set(link.server.connections), set(leader._server.connections)) == (set(link.ranks), set(leader._ranks))


def test_a_leader_serves_the_processes_of_several_containers(launches, join, monkeypatch):
    """Containers that share a network namespace share a leader, but count as machines of their own."""
    this, names = Peer.this, ["c0", "c1", "c2", "c2"]

    def of_container(cls, launch, key=None):
        return this(launch, key)._replace(host=names[launch.rank])

    monkeypatch.setattr(Peer, "this", classmethod(of_container))
    unnumbered = {"node_rank": None, "num_nodes": None, "local_world_size": None, "local_rank": None}
    first, *others = launches()
    results = on_each_rank([first, *(launch._replace(**unnumbered) for launch in others)], join)
    assert [result.launch.node_rank for result in results] == [0, 1, 2, 2]
    (leader,) = [result.link.node_leader for result in results[1:] if result.link.node_leader]
    assert sorted(leader._ranks.values()) == [1, 2, 3]


def test_a_closed_port_means_that_torchruns_rank_zero_has_ended(launches, join):
    with pytest.raises(AnotherRankFailed, match="rank 0 has ended: nothing listens at 127.0.0.1:"):
        join(launches(2, nodes=2)[1]._replace(launcher="torchrun", uses_agent_store=True, local_world_size=1))


@pytest.mark.parametrize("nodes", [1, 2], ids=["rank zero", "leader"])
def test_messages_that_follow_the_answer_at_once_are_kept(launches, join, monkeypatch, nodes):
    def answer_and_send(server, *arguments):
        answer(server, *arguments)
        for connection in server.link.ranks:
            connection.send({"stop_requested": "SIGTERM"})

    answer = RendezvousServer._answer
    monkeypatch.setattr(RendezvousServer, "_answer", answer_and_send)
    links = [result.link for result in on_each_rank(launches(4, nodes=nodes), join)]
    sources = [link.node_leader.rank_zero for link in links if link.node_leader]
    sources += [link.connection for link in links if link.leader == 0]
    assert [source.receive(10) for source in sources] == [[{"stop_requested": "SIGTERM"}]] * len(sources)


TASKS = [("0", "00000002"), ("0", "00000003"), ("1", "20000001")]
"""PBS_NODENUM and PBS_TASKNUM of the tasks of a job with the node file `n1 n1 n2`, as recorded with OpenPBS 23.06."""


@pytest.mark.parametrize("arrivals", permutations(range(3)), ids=str)
def test_the_pbs_task_that_listens_is_rank_zero_in_any_order_of_arrival(launches, join, tmp_path, arrivals):
    def join_in_order(task):
        time.sleep(0.15 * arrivals.index(task))
        node, number = TASKS[task]
        variables = {"PBS_JOBID": "1.n1", "PBS_NODENUM": node, "PBS_TASKNUM": number, "PBS_NODEFILE": str(node_file)}
        return join(detect(requested, variables))

    node_file = tmp_path / "1.n1"
    node_file.write_text("n1\nn1\nn2\n")
    requested = RequestedWorld(address="127.0.0.1", port=launches()[0].port)
    results = on_each_rank(range(3), join_in_order)
    listening = next(task for task in arrivals if TASKS[task][0] == "0")
    assert [bool(result.link.listener) for result in results] == [task == listening for task in range(3)]
    assert [result.launch.rank for result in results] == [listening != 0, listening == 0, 2]
    assert {result.launch.processes_per_node for result in results} == {(2, 1)}
    assert len(results[listening].peers) == 3


def test_a_missing_rank_zero_is_reported_once_per_machine(launches, join, scale_timers):
    scale_timers(0.1)
    errors = on_each_rank(launches()[1:3], lambda launch: join(launch, 1))
    assert all("missing rank 0" in error.found for error in errors)
    assert [error.reported_elsewhere for error in errors] == [True, False]  # local rank zero, once per machine


def test_another_run_on_the_port_is_named(launches, join, scale_timers):
    scale_timers(0.1)
    first, second = launches(2, nodes=1)
    errors = on_each_rank([first, second._replace(world_id="another")], lambda launch: join(launch, 1))
    assert "missing rank 1" in errors[0].found and "another run's rank 0" in errors[1].found


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", f"{GREETING} 3\n".encode()])
def test_the_process_on_a_port_in_use_is_named(launches, join, scale_timers, reply):
    def accept_and_reply():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Timer(2 if not reply else 0.1, connection.close).start()
                connection.sendall(reply)

    scale_timers(0.2)
    ranks = launches(2, nodes=1)
    with network.listen("127.0.0.1", ranks[0].port) as listener, contextlib.suppress(OSError):
        thread = threading.Thread(target=accept_and_reply, daemon=True)
        thread.start()
        errors = on_each_rank(ranks, lambda launch: join(launch, 1))
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert all("--master_port PORT" in error.instead for error in errors)
    if not reply.startswith(GREETING.encode()):
        assert f"in use by process {os.getpid()} (" in errors[0].found


def test_a_process_connects_again_if_its_connection_ends_before_the_answer(launches, join):
    first, second = launches(2, nodes=1)
    with ThreadPoolExecutor(1) as pool:
        with network.listen("127.0.0.1", first.port) as listener:
            waiting = pool.submit(join, second)
            listener.accept()[0].close()
        assert [join(first).launch.rank, waiting.result(10).launch.rank] == [0, 1]


def test_an_address_of_another_machine_is_refused(launches, join, no_route, monkeypatch, scale_timers):
    scale_timers(0.1)
    monkeypatch.setattr(network, "resolve", lambda address: ["192.0.2.1"])  # documentation only (RFC 5737)
    first, second = on_each_rank(launches(2, address="elsewhere"), join)
    assert "elsewhere (192.0.2.1) is another machine or does not exist" in first.found
    assert "elsewhere (192.0.2.1) does not answer" in second.found and second.local_only


def test_a_process_that_is_refused_alone_reports_it_itself(launches, join, monkeypatch, scale_timers):
    """Two machines without a common key have the same rank; rank zero waits for the missing one."""
    thread = threading.local()

    def join_with_own_key(launch):
        thread.key = Key(bytes([launch.node_rank]) * 32, f"the key of node {launch.node_rank}")
        time.sleep(0.2 * launch.node_rank)
        return join(launch, 1.5)

    scale_timers(0.1)
    monkeypatch.setattr(client, "find_key", lambda: thread.key)
    first, second, _ = launches(3, nodes=3)
    results = on_each_rank([first, second, second._replace(node_rank=2)], join_with_own_key)
    refused = [error for error in results[1:] if error.asked == "one process with rank 1"]
    assert [error.local_only for error in refused] == [True] and refused[0].reported_elsewhere is None
    assert "missing rank 2" in results[0].found
