import threading
import time

import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError
from rankzero.runs.directory import RunDirectory
from rankzero.runs.shared_folder import check_shared, wait_until_visible


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "x")
    run.begin_attempt("model: {}\n")
    return run


def seen_by_another_rank(run, **values):
    """Returns the directory as another rank receives it from rank zero."""
    other = RunDirectory(run.path)
    vars(other).update(vars(run) | values)
    return other


def test_the_directory_of_the_attempt_is_accepted(run):
    check_shared(seen_by_another_rank(run))


@pytest.mark.parametrize(
    "values", [{"id": "of another run"}, {"attempt": 2}, {"name_there": "y"}], ids=["run", "copy", "none"]
)
def test_another_directory_is_refused(run, monkeypatch, values):
    monkeypatch.setattr(TIMERS, "shared_file", 0.1)
    if name := values.pop("name_there", None):
        values["path"] = run.path.parent / name
    with pytest.raises(RequestError, match="does not share .*, in which rank zero has created the run [xy]") as caught:
        check_shared(seen_by_another_rank(run, **values))
    assert caught.value.asked == f"--root {run.path.parent}" and "all hosts share" in caught.value.instead


def test_a_file_that_appears_later_is_awaited(tmp_path):
    def write():
        time.sleep(0.3)
        (tmp_path / "file").touch()

    thread = threading.Thread(target=write)
    thread.start()
    assert wait_until_visible((tmp_path / "file").exists, tmp_path / "missing folder")
    thread.join()
