from pathlib import Path

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.requeue import Outcome, Requeue
from rankzero.messages import TIME_IS_UP, Stopped
from rankzero.runs import next_attempt as module
from rankzero.runs.directory import RunDirectory
from rankzero.runs.next_attempt import next_attempt, why_not_again


@pytest.fixture
def asked(monkeypatch):
    """Replaces the scheduler; tests/system/test_slurm_stops.py uses a real one. Returns the requeued runs."""
    calls = []

    def requeue(launch, run):
        calls.append(run)
        return Outcome(Requeue.REFUSED, "  asked  a requeue") if run == "refused" else Outcome(Requeue.DONE, "requeued")

    monkeypatch.setattr(module, "requeue", requeue)
    monkeypatch.setattr(module, "job_around", lambda launch: "a job")
    return calls


def ask(run="x", against=""):
    return next_attempt(RunDirectory(Path(run)), Launch(), against)


def test_the_scheduler_is_asked_to_requeue_the_run(asked):
    assert ask() == "requeued" and asked == ["x"]


def test_a_refusal_by_the_scheduler_is_reported(asked):
    assert ask("refused") == "not requeued\n  asked  a requeue"


def test_no_requeue_is_requested_if_another_attempt_would_not_help(asked):
    assert ask(against="of this") == "not requeued: of this" and not asked


def test_without_a_scheduler_no_message_mentions_requeueing():
    assert ask(against="of this") == ask() == ""


def why(attempt=1, reason="SIGTERM", most=100, begun=True, saved=True):
    if saved:
        Path("x/checkpoints/step-00000001").mkdir(parents=True, exist_ok=True)
    return why_not_again(RunDirectory(Path("x"), attempt=attempt), Stopped(reason), most, begun)


def test_another_attempt_helps_after_a_signal_or_at_the_time_limit(here):
    assert why() == why(begun=False) == why(reason=TIME_IS_UP) == ""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"attempt": 3, "most": 3}, "this was attempt 3, and --max_attempts is 3"),
        ({"reason": TIME_IS_UP, "begun": False}, "not a single step fits into the time that there is"),
        ({"saved": False}, "nothing is saved, so that the next attempt would begin anew"),
    ],
)
def test_the_reason_why_another_attempt_would_not_help_is_returned(here, settings, says):
    assert why(**settings) == says
