from pathlib import Path

import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError
from rankzero.runs.directory import RunDirectory
from rankzero.runs.shared_folder import check_shared, wait_until_visible


@pytest.mark.parametrize("values", [{"id": "of another run"}, {"attempt": 2}, {"path": Path("runs/y")}], ids=str)
def test_only_the_directory_of_the_attempt_is_accepted(cwd, monkeypatch, values):
    monkeypatch.setattr(TIMERS, "shared_file", 0.1)
    run = RunDirectory(Path("runs/x"))
    run.begin_attempt("model: {}\n")
    on_another_rank = RunDirectory(run.path)
    vars(on_another_rank).update(vars(run))
    check_shared(on_another_rank)
    vars(on_another_rank).update(values)
    with pytest.raises(RequestError, match="does not share .*, in which rank zero has created the run [xy]") as caught:
        check_shared(on_another_rank)
    assert caught.value.asked == "--root runs" and "all hosts share" in caught.value.instead
    assert wait_until_visible(iter([False, False, True]).__next__, cwd / "missing folder")  # it appears later
