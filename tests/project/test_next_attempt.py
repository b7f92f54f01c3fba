from pathlib import Path

import pytest

from project import next_attempt as module
from project.environments.launch import Launch
from project.environments.requeue import Outcome, Requeue
from project.errors import TIME_IS_UP, Stopped
from project.next_attempt import next_attempt
from project.run_directory import RunDirectory


@pytest.fixture
def asked(monkeypatch):
    """Stands in for the scheduler, which tests/system/test_slurm_stops.py asks in earnest."""
    calls = []

    def requeue(launch, run):
        calls.append(run)
        return Outcome(Requeue.REFUSED, "  asked  a requeue") if run == "refused" else Outcome(Requeue.DONE, "requeued")

    monkeypatch.setattr(module, "requeue", requeue)
    monkeypatch.setattr(module, "job_around", lambda launch: "a job")
    return calls


def ask(run="x", attempt=1, reason="SIGTERM", how="auto", most=100, begun=True, saved=True):
    if saved:
        Path(run, "checkpoints", "step-00000001").mkdir(parents=True, exist_ok=True)
    return next_attempt(RunDirectory(Path(run), attempt=attempt), Launch(), Stopped(reason), how, most, begun)


def test_the_scheduler_is_asked(here, asked):
    assert ask() == "requeued" and ask(begun=False) == "requeued" and asked == ["x", "x"]


def test_a_refusal_is_told(here, asked):
    assert ask("refused") == "not requeued\n  asked  a requeue"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"how": "never"}, ""),
        ({"attempt": 3, "most": 3}, "not requeued: this was attempt 3, and --max_attempts is 3"),
        (
            {"reason": TIME_IS_UP, "begun": False},
            "not a single step fits into the time that there is: another attempt would not help",
        ),
        ({"saved": False}, "not requeued: nothing is saved, so that the next attempt would begin anew"),
    ],
)
def test_what_would_not_help_or_is_not_wanted_is_not_asked_for(here, asked, settings, says):
    assert ask(**settings) == says and not asked


def test_without_a_scheduler_nobody_speaks_of_requeuing(here):
    assert ask(attempt=3, most=3) == ask(saved=False) == ""
