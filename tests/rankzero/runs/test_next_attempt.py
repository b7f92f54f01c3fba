import json
from pathlib import Path

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.requeue import Outcome, Requeue
from rankzero.messages import TIME_LIMIT_REACHED, Stopped
from rankzero.runs import next_attempt as module
from rankzero.runs.directory import RunDirectory
from rankzero.runs.next_attempt import objection_to_next_attempt, request_next_attempt


def request(run="x", objection=""):
    return request_next_attempt(RunDirectory(Path(run)), Launch(), objection)


def test_a_scheduler_is_asked_to_requeue_the_run_unless_another_attempt_would_not_help(monkeypatch):
    """tests/system/test_slurm_stops.py uses a real scheduler."""
    assert request(objection="of this") == request() == ""  # without a scheduler
    requeued = []

    def requeue(launch, run):
        requeued.append(run)
        return Outcome(Requeue.REFUSED, "  asked  a requeue") if run == "refused" else Outcome(Requeue.DONE, "requeued")

    monkeypatch.setattr(module, "requeue", requeue)
    monkeypatch.setattr(module, "current_job", lambda launch: "a job")
    assert request(objection="of this") == "not requeued: of this" and not requeued
    assert request() == "requeued" and requeued == ["x"]
    assert request("refused") == "not requeued\n  asked  a requeue"


NO_PROGRESS = "the last 3 attempts began at step 40 and saved no later step; their logs in logs/ may state why"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"has_trained": False}, ""),
        ({"reason": TIME_LIMIT_REACHED}, ""),
        ({"steps": [0, 1, 2], "max_attempts": 3}, "this was attempt 3, and --max_attempts is 3"),
        ({"reason": TIME_LIMIT_REACHED, "has_trained": False}, "the time limit is too short for a single step"),
        ({"saved": None}, "there is no checkpoint, so the next attempt would restart from the beginning"),
        ({"steps": [0, 40, 40, 40]}, NO_PROGRESS),
        ({"steps": [40, 40]}, ""),  # two attempts
        ({"steps": [0, 40, 40]}, ""),
        ({"steps": [40, 40, 40], "saved": 60}, ""),  # this attempt has saved
        ({"steps": [None, None, None]}, ""),  # written by an older version
    ],
)
def test_the_reason_why_another_attempt_would_not_help_is_returned(cwd, settings, expected):
    defaults = {"steps": [], "saved": 40, "reason": "SIGTERM", "max_attempts": 100, "has_trained": True}
    steps, saved, reason, *limits = {**defaults, **settings}.values()
    (cwd / "x/checkpoints" / ("other" if saved is None else f"step-{saved:08d}")).mkdir(parents=True)
    if steps:
        (cwd / "x/run.json").write_text(json.dumps({"attempts": [{"step": step} for step in steps]}))
    run = RunDirectory(Path("x"), attempt=len(steps) or 1)
    assert objection_to_next_attempt(run, Stopped(reason), *limits) == expected
