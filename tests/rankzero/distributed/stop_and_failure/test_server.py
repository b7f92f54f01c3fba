import time

import pytest

from rankzero.distributed.stop_and_failure import server
from rankzero.distributed.stop_and_failure.protocol import CAUSE
from rankzero.distributed.stop_and_failure.server import PARENT_REPORTS
from rankzero.distributed.timers import TIMERS


def all_messages(connection, count):
    """Returns the next messages without heartbeats; fewer if the connection ends or 10 seconds pass."""
    found, deadline = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline and (received := connection.receive(1)) is not None:
        found += [message for message in received if message and "rank_zero" not in message]
    return found


def expect_messages(ranks, *messages):
    for connection in ranks:
        assert all_messages(connection, len(messages)) == [*messages]


@pytest.mark.parametrize(
    ("positions", "safe_point"),
    [([10], 11), ([10, 11], 12), ([10, 11, 12], 13), ([-1, -1], 0), ([3, None, 2], 4)],
    ids=["one rank", "two ranks", "three ranks", "before the first step", "a rank leaves"],
)
def test_all_ranks_stop_at_the_safe_point_after_the_most_advanced_position(world, positions, safe_point):
    ranks = world(len(positions)).ranks
    ranks[-1].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})
    ranks[0].send({"stop": "SIGINT"})  # ignored, as a stop has been requested
    present = [connection for connection, position in zip(ranks, positions, strict=True) if position is not None]
    for connection, position in zip(ranks, positions, strict=True):
        connection.send({"leaving": True} if position is None else {"position": position})
        if position is None:
            connection.close()
    expect_messages(present, {"stop_at": safe_point})


@pytest.mark.parametrize(
    ("answers", "decision"),
    [([(True, 7), (True, 7)], [7, [0, 1]]), ([(False, 8), (True, 7)], [9, [1]]), ([(True, 8), (True, 7)], [9, [0, 1]])],
    ids=["all ranks are there", "a rank has passed", "all are there in different batches"],
)
def test_an_agreement_names_the_batch_of_the_point_or_one_that_no_rank_has_begun(world, answers, decision):
    ranks = world(2).ranks
    for number in range(2):
        ranks[1].send({"answer": ["stop", number, *answers[1]]})
        expect_messages(ranks, {"question": ["stop", answers[1][1]]})
        ranks[0].send({"answer": ["stop", number, *answers[0]]})
        expect_messages(ranks, {"decision": ["stop", *decision]})
        ranks[0].send({"answer": ["stop", number, False, 9]})  # late, and therefore ignored


def test_the_first_failure_is_sent_to_all_ranks_with_its_reporting_rank(world):
    ranks = world(3).ranks
    ranks[1].send({"failed": "out of memory"})
    expect_messages(ranks, {"failed": ["out of memory", 1, True]})
    ranks[0].send({"failed": "connection closed by peer"})
    ranks[0].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})  # without a second failure before it


@pytest.mark.parametrize(
    ("launcher", "description", "text", "reporting_rank"),
    [
        ("env", "", "was lost (killed? out of memory?)", 0),
        ("local", "", "was lost (killed? out of memory?)", PARENT_REPORTS),
        ("env", "was killed by SIGKILL", "was killed by SIGKILL", 0),
    ],
)
def test_a_lost_rank_is_a_failure(world, launcher, description, text, reporting_rank):
    ranks = world(3, launcher=launcher, describe_exit=["", description, ""].__getitem__).ranks
    ranks[1].close()
    expect_messages([ranks[0], ranks[2]], {"failed": [f"rank 1 on b {text}", reporting_rank, False]})


def test_a_lost_rank_is_not_named_as_the_cause_of_a_hang(world, monkeypatch):
    monkeypatch.setattr(TIMERS, "heartbeat", 0.02)
    monkeypatch.setattr(server.hangs, "silence_seconds", lambda interval: 0.5)
    ranks = world(2).ranks
    ranks[1].send({"status": [7, "backward", 0.1, 0.3, False, "", 0, "", 0.1]})
    ranks[1].close()
    cause = "rank 1 on b was lost (killed? out of memory?), last seen in backward at step 7"
    assert all_messages(ranks[0], 1) == [{"failed": [cause, 0, False]}]
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert all("rank_zero" in message for message in ranks[0].receive(1))


def test_messages_of_the_wrong_type_are_ignored_and_long_or_unprintable_causes_are_not_passed_on(world):
    ranks = world(2).ranks
    for message in (
        *({"stop": 7}, {"position": "1"}, {"position": 1.5}, {"position": None}, {"failed": ["x"]}, {"failed": None}),
        *({"leaving": 1.5}, {"status": 5}, {"status": [1]}, {"status": {"step": 1}}, {"stop": None}, {"unknown": 1}),
        *({"value": 1}, {"value": ["1", 2]}, {"value": [1, 2, 3]}, {"refusal": 1}, {"refusal": None}),
    ):
        ranks[1].send(message)
    ranks[1].send({"stop": "SIGTERM"})
    expect_messages(ranks, {"stop_requested": "SIGTERM"})
    ranks[1].send({"failed": "\x1b[2J\ud800" + "x" * 100_000})
    ((cause, *_),) = [message["failed"] for message in all_messages(ranks[0], 1)]
    assert cause.startswith("?[2J?xxx") and len(cause) == CAUSE.limit


def test_finish_announces_rank_zeros_exit_and_the_thread_ends_with_the_other_ranks_or_in_time(world):
    for seconds in (60.0, 0.05):
        control = world(2)
        control.server.finish(seconds)
        control.ranks[0].send({"leaving": True})
        expect_messages(control.ranks[1:], {"done": True})
        if seconds > 1:
            assert control.server.thread.is_alive()
            control.ranks[1].send({"leaving": True})
        control.server.thread.join(10)
        assert not control.server.thread.is_alive()
