import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError
from rankzero.runs.directory import RunDirectory
from rankzero.runs.shared_folder import check_shared, wait_until_visible


def seen_by_another_rank(run, **values):
    """Returns the directory as another rank receives it from rank zero."""
    other = RunDirectory(run.path)
    vars(other).update(vars(run) | values)
    return other


@pytest.mark.parametrize(
    "values", [{"id": "of another run"}, {"attempt": 2}, {"name_there": "y"}], ids=["run", "copy", "none"]
)
def test_only_the_directory_of_the_attempt_is_accepted(tmp_path, monkeypatch, values):
    monkeypatch.setattr(TIMERS, "shared_file", 0.1)
    run = RunDirectory(tmp_path / "x")
    run.begin_attempt("model: {}\n")
    check_shared(seen_by_another_rank(run))
    if name := values.pop("name_there", None):
        values["path"] = run.path.parent / name
    with pytest.raises(RequestError, match="does not share .*, in which rank zero has created the run [xy]") as caught:
        check_shared(seen_by_another_rank(run, **values))
    assert caught.value.asked == f"--root {run.path.parent}" and "all hosts share" in caught.value.instead


def test_a_file_that_appears_later_is_awaited(tmp_path):
    assert wait_until_visible(iter([False, False, True]).__next__, tmp_path / "missing folder")
