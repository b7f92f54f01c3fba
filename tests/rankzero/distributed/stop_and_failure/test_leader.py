import time

import pytest

from rankzero.distributed.timers import TIMERS
from running import wait_until


def status(step):
    return {"status": [step, "backward", 0.1, 300.0, False, "", 0, "", 0.1]}


def request_once(nodes):
    """Requests the statuses of all ranks a single time."""
    nodes.server.interval = 1000.0
    nodes.server.send_all({"rank_zero": ""})
    time.sleep(0.3)


def report_and_wait(nodes, rank, step):
    """Sends a status of a rank, and waits until rank zero has it."""
    nodes.ranks[rank].send(status(step))
    wait_until(lambda: nodes.server._hangs.last_place(rank) == f"backward at step {step}")


def test_all_ranks_agree_on_a_stop_over_one_connection_per_node(nodes):
    ranks = nodes.ranks
    assert len(nodes.server._connections) == 3  # rank zero's own node's two ranks and the leader
    wait_until(lambda: {} in (ranks[3].receive(1) or []))  # the leader sends heartbeats of its own
    ranks[3].send({"stop": "SIGTERM"})
    for rank in ranks:
        assert rank.next("stop_requested") == {"stop_requested": "SIGTERM"}
    for rank in ranks:
        rank.send({"position": 10 + rank.rank})
    assert [rank.next("stop_at") for rank in ranks] == [{"stop_at": 14}] * 4


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failure_is_sent_to_all_ranks_with_its_reporting_rank(nodes, failing):
    nodes.ranks[failing].send({"failed": "out of memory"})
    assert [rank.next("failed") for rank in nodes.ranks] == [{"failed": ["out of memory", failing, True]}] * 4


@pytest.mark.parametrize("lost", [1, 3])
def test_a_lost_rank_is_named_on_all_other_ranks(nodes, lost):
    nodes.ranks[lost].close()
    for rank in nodes.ranks:
        if rank.rank != lost:
            cause, *others = rank.next("failed")["failed"]
            assert cause.startswith(f"rank {lost} on {'aabb'[lost]} was lost (") and others == [0, False]


def test_the_states_of_all_ranks_reach_rank_zero_and_are_not_repeated(nodes):
    for rank in range(4):
        report_and_wait(nodes, rank, step=rank)
    _, reported_at = nodes.server._hangs._statuses[3]
    time.sleep(0.3)  # several requests
    assert nodes.server._hangs._statuses[3][1] == reported_at


def test_a_status_that_may_become_a_hang_reaches_rank_zero_without_a_request(nodes):
    """Others do not, but a rank may answer a request late."""
    request_once(nodes)
    for rank in (2, 3):
        report_and_wait(nodes, rank, step=6)
    nodes.ranks[2].send(status(7))
    nodes.ranks[3].send({"status": [7, "data wait", 200.0, 300.0, False, "", 0, "", 0.1]})
    wait_until(lambda: nodes.server._hangs.last_place(3) == "data wait at step 7")
    assert nodes.server._hangs.last_place(2) == "backward at step 6"


def test_a_rank_that_has_left_does_not_seem_to_train_again(nodes):
    nodes.server.interval = 1000.0
    nodes.ranks[3].send(status(7))
    nodes.ranks[3].send({"leaving": True})
    wait_until(lambda: 3 in nodes.server._exited_ranks)
    request_once(nodes)
    assert nodes.server._hangs.last_place(3) == ""


def test_the_loss_of_the_leaders_connection_names_the_leader(nodes):
    nodes.leader.rank_zero.connection.shutdown(2)
    failed, lost = "rank 2 on b was lost (killed? out of memory?)", " (killed? out of memory?)"
    assert [rank.next("failed") for rank in nodes.ranks[:2]] == [{"failed": [failed, 0, False]}] * 2
    assert [rank.next("rank_zero_lost") for rank in nodes.ranks[2:]] == [{"rank_zero_lost": lost}] * 2


def test_a_leader_that_finishes_first_waits_for_its_node_a_limited_time(nodes, monkeypatch):
    monkeypatch.setattr(TIMERS, "leave", 0.2)
    nodes.ranks[2].send({"leaving": True})
    nodes.leader.finish(0.2)
    assert nodes.ranks[3].next("done") == {"done": True}
    nodes.ranks[3].close()
    nodes.leader.thread.join(10)
    nodes.ranks[1].send({"stop": "SIGTERM"})  # the run continues: rank zero has recorded no failure
    assert nodes.ranks[0].next("stop_requested") == {"stop_requested": "SIGTERM"}
    assert nodes.server._failure is None and nodes.server._exited_ranks == {2, 3}


def test_rank_zeros_exit_is_announced_to_all_ranks(nodes):
    nodes.server.finish(0.01)
    assert [rank.next("done") for rank in nodes.ranks] == [{"done": True}] * 4


def test_messages_that_name_another_rank_are_ignored(nodes):
    for name in (2, 7, "3", None, [3]):
        nodes.ranks[3].connection.send({"rank": name, "failed": "an error of another rank"})
    nodes.ranks[3].send({"stop": "SIGTERM"})
    assert [rank.next("stop_requested") for rank in nodes.ranks] == [{"stop_requested": "SIGTERM"}] * 4


def test_a_rank_that_left_its_leader_while_rank_zero_answered_is_lost(nodes):
    nodes.leader.rank_zero.send({"gone": "id 1"})  # not a rank of this node
    nodes.leader.rank_zero.send({"gone": "id 3"})
    assert nodes.ranks[0].next("failed")["failed"][0].startswith("rank 3 on b was lost")


def test_values_and_decisions_pass_through_the_leader(nodes):
    exchange = nodes.server._exchange
    exchange._send_all = nodes.server.send_all
    for rank in nodes.ranks[1:]:
        rank.send({"value": [1, rank.rank * 10]})
    assert exchange.decide(0, sum, 10, "starting") == 60
    assert [rank.next("decided") for rank in nodes.ranks[1:]] == [{"decided": [1, {"decision": 60}]}] * 3


def test_the_first_rank_with_a_refusal_is_named(nodes):
    nodes.ranks[3].send({"refusal": "a digest"})
    refusals = {"a digest": "rank 3 on b"}
    assert nodes.ranks[3].next("refusals") == {"refusals": [refusals, 3]}
    nodes.ranks[1].send({"refusal": "a digest"})
    assert nodes.ranks[1].next("refusals") == {"refusals": [refusals, 1]}
    nodes.ranks[0].send({"refusal": ""})
    assert nodes.ranks[0].next("refusals") == {"refusals": [refusals, 0]}
