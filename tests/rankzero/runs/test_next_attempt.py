import json
from pathlib import Path

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.requeue import Outcome, Requeue
from rankzero.messages import TIME_LIMIT_REACHED, Stopped
from rankzero.runs import next_attempt as module
from rankzero.runs.directory import RunDirectory
from rankzero.runs.next_attempt import objection_to_next_attempt, request_next_attempt


@pytest.fixture
def requeued_runs(monkeypatch):
    """Replaces the scheduler; tests/system/test_slurm_stops.py uses a real one. Returns the requeued runs."""
    calls = []

    def requeue(launch, run):
        calls.append(run)
        return Outcome(Requeue.REFUSED, "  asked  a requeue") if run == "refused" else Outcome(Requeue.DONE, "requeued")

    monkeypatch.setattr(module, "requeue", requeue)
    monkeypatch.setattr(module, "current_job", lambda launch: "a job")
    return calls


def request(run="x", objection=""):
    return request_next_attempt(RunDirectory(Path(run)), Launch(), objection)


def test_the_scheduler_is_asked_to_requeue_the_run_unless_another_attempt_would_not_help(requeued_runs):
    assert request(objection="of this") == "not requeued: of this" and not requeued_runs
    assert request() == "requeued" and requeued_runs == ["x"]
    assert request("refused") == "not requeued\n  asked  a requeue"


def test_without_a_scheduler_no_message_mentions_requeueing():
    assert request(objection="of this") == request() == ""


def objection(attempt=1, reason="SIGTERM", max_attempts=100, has_trained=True, saved=True):
    if saved:
        Path("x/checkpoints/step-00000001").mkdir(parents=True, exist_ok=True)
    return objection_to_next_attempt(
        RunDirectory(Path("x"), attempt=attempt), Stopped(reason), max_attempts, has_trained
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"has_trained": False}, ""),
        ({"reason": TIME_LIMIT_REACHED}, ""),
        ({"attempt": 3, "max_attempts": 3}, "this was attempt 3, and --max_attempts is 3"),
        ({"reason": TIME_LIMIT_REACHED, "has_trained": False}, "the time limit is too short for a single step"),
        ({"saved": False}, "there is no checkpoint, so the next attempt would restart from the beginning"),
    ],
)
def test_the_reason_why_another_attempt_would_not_help_is_returned(cwd, settings, expected):
    assert objection(**settings) == expected


@pytest.mark.parametrize(
    ("steps", "saved", "step"),
    [
        ([0, 40, 40, 40], 40, 40),
        ([40, 40], 40, None),  # two attempts
        ([0, 40, 40], 40, None),
        ([40, 40, 40], 60, None),  # this attempt has saved
        ([None, None, None], 40, None),  # written by an older version
    ],
)
def test_three_attempts_that_complete_no_step_are_not_followed_by_another(cwd, steps, saved, step):
    Path(f"x/checkpoints/step-{saved:08d}").mkdir(parents=True)
    Path("x/run.json").write_text(json.dumps({"attempts": [{"step": number} for number in steps]}))
    expected = f"the last 3 attempts began at step {step} and saved no later step; their logs in logs/ may state why"
    reason = objection_to_next_attempt(RunDirectory(Path("x"), attempt=len(steps)), Stopped("SIGTERM"), 100, True)
    assert reason == (expected if step is not None else "")
