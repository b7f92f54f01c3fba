import pytest
from lightning.pytorch.callbacks import RichProgressBar

from rankzero.tracking.progress.bar import BarProgress
from rankzero.tracking.progress.choice import progress_callbacks, without_progress
from rankzero.tracking.progress.plain_lines import PlainProgress


def test_a_job_prints_plain_lines_also_in_a_pseudo_terminal_and_a_closed_stdout_has_no_bar(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found = {name: progress_callbacks({}, [], name) for name in ("local", "torchrun", "env", "mpi", "pbs", "slurm")}
    assert [type(callback) for (callback,) in found.values()] == [*[BarProgress] * 3, *[PlainProgress] * 3]
    monkeypatch.setattr("sys.stdout", None)
    (callback,) = progress_callbacks({}, [], "local")
    assert isinstance(callback, PlainProgress)


class OwnBar(BarProgress):
    """A user's bar."""


@pytest.mark.parametrize(
    ("arguments", "bars"),
    [({}, [RichProgressBar]), ({}, [OwnBar]), ({"enable_progress_bar": False}, []), ({"barebones": True}, [])],
)
def test_a_users_bar_replaces_ours_and_disabled_progress_has_no_callback(arguments, bars):
    assert progress_callbacks(arguments, [bar() for bar in bars], "local") == []


def test_a_quiet_run_keeps_what_the_user_requested():
    assert without_progress({}, []) == {"enable_progress_bar": False, "enable_model_summary": False}
    assert without_progress({}, [OwnBar()]) == {"enable_model_summary": False}
    assert without_progress({"enable_model_summary": True}, [OwnBar()]) == {"enable_model_summary": True}
    assert without_progress({"barebones": True}, []) == {"barebones": True, "enable_progress_bar": False}
