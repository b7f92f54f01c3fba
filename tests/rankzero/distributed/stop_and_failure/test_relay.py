"""A real control server and the relay of another node; the ranks are sockets of the test."""

import socket
import time

import pytest

from rankzero.distributed import network
from rankzero.distributed.connections.handshake import perform_handshake
from rankzero.distributed.connections.line_connection import LineConnection
from rankzero.distributed.connections.local_socket import connect_locally, listen_locally
from rankzero.distributed.rendezvous.peers import Members, Peer
from rankzero.distributed.stop_and_failure.relay import NodeRelay
from rankzero.distributed.stop_and_failure.server import ControlServer
from rankzero.distributed.timers import TIMERS

SECRET = b"s" * 32


class TwoNodes:
    """Ranks 0 and 1 on rank zero's node, ranks 2 and 3 on a node with a relay."""

    def __init__(self, name):
        listener = network.listen("127.0.0.1", 0)
        self.local_name = f"{name} first"
        members = Members(Peer(rank, rank % 2, rank // 2, 4, "aabb"[rank], rank) for rank in range(4))
        sockets = [listen_locally(self.local_name), listener]
        self.server = ControlServer(sockets, members, False, lambda rank: "", "w", SECRET, 0.05)
        rank_zero = LineConnection(socket.create_connection(listener.getsockname(), timeout=10))
        assert perform_handshake(rank_zero, "control", "w", SECRET, True, 10)
        self.relay_name = f"{name} second"
        self.relay = NodeRelay(listen_locally(self.relay_name), rank_zero, "w", 2)
        self.ranks = [Rank(rank, self.relay_name if rank > 1 else self.local_name) for rank in range(4)]

    def wait_for_all(self):
        deadline = time.monotonic() + 10
        while self.server.connected < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.server.connected == 4
        return self.ranks

    def close(self):
        for rank in self.ranks:
            rank.send({"leaving": True})
            rank.connection.close()
        self.server._thread.join(10)
        self.relay._thread.join(10)
        assert not self.server._thread.is_alive() and not self.relay._thread.is_alive()


class Rank:
    """The connection of one rank."""

    def __init__(self, rank, name):
        self.rank, self.connection = rank, LineConnection(connect_locally(name))
        assert perform_handshake(self.connection, "control", "w", None, False, 10)
        self.send({})

    def send(self, message):
        self.connection.send({"rank": self.rank, **message})

    def next(self, name):
        """Returns the next message with this entry; None if the connection ends."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (messages := self.connection.receive(1)) is not None:
            for message in messages:
                if name in message:
                    return message
        return None


def status(step):
    return {"status": [step, "backward", 0.1, 300.0, False, "", 0, "", 0.1]}


def wait_for(condition):
    """Returns whether the condition holds within 10 s."""
    deadline = time.monotonic() + 10
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


def request_once(nodes):
    """Requests the statuses of all ranks a single time."""
    nodes.server.interval = 1000.0
    nodes.server._send_all({"rank_zero": ""})
    time.sleep(0.3)


def report_and_wait(nodes, rank, step):
    """Sends a status of a rank, and waits until rank zero has it."""
    nodes.ranks[rank].send(status(step))
    assert wait_for(lambda: nodes.server._hangs.last_place(rank) == f"backward at step {step}")


@pytest.fixture
def nodes(request, scale_timers):
    scale_timers(0.2)
    created = TwoNodes(request.node.name)
    yield created
    created.close()


def test_all_ranks_agree_on_a_stop(nodes):
    ranks = nodes.wait_for_all()
    ranks[3].send({"stop": "SIGTERM"})
    for rank in ranks:
        assert rank.next("stop_requested") == {"stop_requested": "SIGTERM"}
        rank.send({"position": 10 + rank.rank})
    assert [rank.next("stop_at") for rank in ranks] == [{"stop_at": 14}] * 4


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_is_sent_to_all_ranks_with_its_reporting_rank(nodes, failing):
    ranks = nodes.wait_for_all()
    ranks[failing].send({"failed": "out of memory"})
    assert [rank.next("failed") for rank in ranks] == [{"failed": "out of memory", "by": failing}] * 4


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_rank_is_named_on_all_other_ranks(nodes, lost):
    ranks = nodes.wait_for_all()
    ranks[lost].connection.close()
    for rank in ranks:
        if rank.rank != lost:
            message = rank.next("failed")
            assert message["failed"].startswith(f"rank {lost} on {'aabb'[lost]} was lost (") and message["by"] == 0


def test_the_states_of_all_ranks_reach_rank_zero(nodes):
    ranks = nodes.wait_for_all()
    for rank in ranks:
        rank.send(status(rank.rank))
    for rank in range(4):
        assert wait_for(lambda rank=rank: nodes.server._hangs.last_place(rank) == f"backward at step {rank}")


def test_a_status_that_may_become_a_hang_reaches_rank_zero_without_a_request(nodes):
    ranks = nodes.wait_for_all()
    request_once(nodes)
    for rank in (2, 3):
        report_and_wait(nodes, rank, step=6)
    ranks[2].send(status(7))
    ranks[3].send({"status": [7, "data wait", 200.0, 300.0, False, "", 0, "", 0.1]})
    assert wait_for(lambda: nodes.server._hangs.last_place(3) == "data wait at step 7")
    assert nodes.server._hangs.last_place(2) == "backward at step 6"


def test_a_rank_that_answers_a_request_late_is_not_skipped(nodes):
    nodes.wait_for_all()
    request_once(nodes)
    report_and_wait(nodes, 3, step=7)


def test_a_rank_that_has_left_does_not_seem_to_train_again(nodes):
    ranks = nodes.wait_for_all()
    nodes.server.interval = 1000.0
    ranks[3].send(status(7))
    ranks[3].send({"leaving": True})
    assert wait_for(lambda: 3 in nodes.server._exited_ranks)
    request_once(nodes)
    assert nodes.server._hangs.last_place(3) == ""


def test_the_status_of_a_rank_that_has_stopped_reporting_is_not_repeated(nodes):
    nodes.wait_for_all()
    report_and_wait(nodes, 3, step=7)
    _, reported_at = nodes.server._hangs._statuses[3]
    time.sleep(0.3)  # several requests
    assert nodes.server._hangs._statuses[3][1] == reported_at


def test_the_loss_of_the_leaders_connection_names_the_leader(nodes):
    ranks = nodes.wait_for_all()
    nodes.relay.rank_zero.connection.shutdown(2)
    expected = {"failed": "rank 2 on b was lost (killed? out of memory?)", "by": 0}
    assert [rank.next("failed") for rank in ranks[:2]] == [expected] * 2
    assert [rank.next("lost") for rank in ranks[2:]] == [{"lost": " (killed? out of memory?)"}] * 2


def test_a_leader_that_finishes_first_waits_for_its_node_a_limited_time(nodes, monkeypatch):
    monkeypatch.setattr(TIMERS, "leave", 0.2)
    ranks = nodes.wait_for_all()
    ranks[2].send({"leaving": True})
    nodes.relay.finish()
    assert ranks[3].next("done") == {"done": True}
    ranks[3].connection.close()
    nodes.relay._thread.join(10)
    ranks[1].send({"stop": "SIGTERM"})  # the run continues: rank zero has recorded no failure
    assert ranks[0].next("stop_requested") == {"stop_requested": "SIGTERM"}
    assert nodes.server._failure is None and nodes.server._exited_ranks == {2, 3}


def test_rank_zeros_exit_is_announced_to_all_ranks(nodes, monkeypatch):
    monkeypatch.setattr(TIMERS, "leave", 0.01)
    ranks = nodes.wait_for_all()
    nodes.server.finish()
    assert [rank.next("done") for rank in ranks] == [{"done": True}] * 4


def test_the_connections_of_rank_zero_grow_with_the_nodes(nodes):
    nodes.wait_for_all()
    assert len(nodes.server._connections) == 3  # its own node's two ranks and the relay


@pytest.mark.parametrize("message", [{"rank": 2}, {"rank": 7}, {"rank": "2"}, {"rank": None}, {"rank": [2]}, {"x": 1}])
def test_a_process_that_is_no_rank_of_the_node_is_disconnected(nodes, message):
    ranks = nodes.wait_for_all()
    attacker = LineConnection(connect_locally(nodes.relay_name))
    assert perform_handshake(attacker, "control", "w", None, False, 10)
    attacker.send({**message, "stop": "an attacker"})
    attacker.connection.settimeout(10)
    assert attacker.receive(10) is None
    ranks[3].send({"stop": "SIGTERM"})
    assert ranks[0].next("stop_requested") == {"stop_requested": "SIGTERM"}


def test_a_message_with_the_number_of_another_rank_is_ignored(nodes):
    ranks = nodes.wait_for_all()
    ranks[3].connection.send({"rank": 2, "failed": "an error of another rank"})
    ranks[3].send({"stop": "SIGTERM"})
    assert [rank.next("stop_requested") for rank in ranks] == [{"stop_requested": "SIGTERM"}] * 4


def test_a_leader_sends_heartbeats_of_its_own(nodes):
    ranks = nodes.wait_for_all()
    deadline = time.monotonic() + 10
    while {} not in (ranks[3].connection.receive(1) or []):
        assert time.monotonic() < deadline


def test_a_leader_that_its_relay_has_announced_receives_an_earlier_stop_request(nodes):
    ranks = nodes.wait_for_all()
    ranks[0].send({"stop": "SIGTERM"})
    assert ranks[2].next("stop_requested")
    nodes.relay.rank_zero.send({"rank": 2})  # as if rank 2 connected to its relay only now
    assert ranks[2].next("stop_requested") == {"stop_requested": "SIGTERM"}
