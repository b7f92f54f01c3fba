import copy
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS
from rankzero.messages import TIME_LIMIT_REACHED, RequestError, Stopped, TakenOverError
from rankzero.runs import attempt as module
from rankzero.runs.attempt import objection_to_next_attempt, request_next_attempt
from rankzero.runs.directory import RunDirectory, choose_run
from rankzero.runs.rank_log import check_shared, wait_until_visible


def begin(root, name="x", text="a: 1", job=None):
    run = choose_run(str(root), name, "MLP-Toy", job)
    run.begin_attempt(text)
    return run


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_unnamed_and_archived_runs_are_numbered_and_a_restarted_job_finds_its_runs_again(tmp_path, monkeypatch):
    assert [begin(tmp_path, None).name for _ in range(3)] == ["MLP-Toy-1", "MLP-Toy-2", "MLP-Toy-3"]
    for start in (1, 2):
        monkeypatch.setattr("rankzero.runs.directory._job_runs", {})
        runs = [choose_run(str(tmp_path), None, "MLP-Toy", "4711") for _ in range(2)]
        runs.append(copy.deepcopy(runs[0]))
        for run in runs:
            run.continue_in_process()
            run.begin_attempt("a: 1")
        assert [run.name for run in runs] == ["MLP-Toy-4711", "MLP-Toy-4711-2", "MLP-Toy-4711-3"]
        assert {run.attempt for run in runs} == {start}
    first_copy, second_copy = copy.deepcopy(runs[0]), copy.deepcopy(runs[0])
    for run in (first_copy, second_copy):
        run.continue_in_process()
        run.begin_attempt("a: 1")
    assert [first_copy.name, second_copy.name] == ["MLP-Toy-4711", "MLP-Toy-4711-4"]
    for _ in range(2):
        begin(tmp_path).archive()
    assert sorted(path.name for path in tmp_path.glob("x*")) == ["x.before-1", "x.before-2"]


def test_concurrent_starts_never_share_a_number(tmp_path):
    runs = [choose_run(str(tmp_path), None, "MLP-Toy", None) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda run: run.begin_attempt("a: 1"), runs))
    assert len({run.path for run in runs}) == 8
    assert all(len(run.read("run.json")["attempts"]) == 1 for run in runs)


def test_the_first_attempt_uses_a_claimed_directory(tmp_path):
    first, second = (choose_run(str(tmp_path), None, "MLP-Toy", None) for _ in range(2))
    for run in (first, second, first):
        run.claim()
    runs = [first, second, copy.deepcopy(first)]
    for run in runs:
        run.continue_in_process()
        run.begin_attempt("a: 1")
    assert [(run.name, run.attempt) for run in runs] == [("MLP-Toy-1", 1), ("MLP-Toy-2", 1), ("MLP-Toy-3", 1)]


def test_every_attempt_keeps_its_configuration_and_files_that_a_killed_attempt_left_are_removed_or_empty(tmp_path):
    killed = begin(tmp_path)
    (killed.path / ".summary.json.17.saving").write_text("half")
    (killed.path / "summary.json").write_text('{"status": "fin')
    run = begin(tmp_path, text="a: 2")
    assert (run.path / "config.yaml").read_text() == "a: 2"
    assert (run.path / "attempts/0001/config.yaml").read_text() == "a: 1"
    assert [attempt["number"] for attempt in run.read("run.json")["attempts"]] == [1, 2]
    assert not list(run.path.glob(".*")) and run.read("summary.json") == {} == run.read("missing.json")


def test_discarding_an_attempt_leaves_earlier_attempts_unchanged_or_removes_the_run_and_its_root(tmp_path):
    begin(tmp_path / "runs", None).discard_attempt()
    assert list(tmp_path.iterdir()) == []
    begin(tmp_path)
    before = contents(tmp_path)
    begin(tmp_path, text="a: 2").discard_attempt()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_attempt_is_no_longer_the_owner_once_a_newer_attempt_has_begun(tmp_path, resume):
    first = begin(tmp_path)
    first.assert_owner()
    second = RunDirectory(first.path)
    if resume == "never":
        second.archive()  # the newer run counts its attempts from 1 again
    second.begin_attempt("a: 1")
    second.assert_owner()
    with pytest.raises(TakenOverError):
        first.assert_owner()


def test_a_root_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(RequestError, match="a URL"):
        choose_run("s3://bucket/runs", None, "MLP-Toy", None)
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="is a file"):
            choose_run(str(root), None, "MLP-Toy", None).check_writable()
    run = choose_run("/proc/runs", None, "MLP-Toy", None)
    for begin_or_claim in (lambda: run.begin_attempt("a: 1"), run.claim):
        with pytest.raises(RequestError, match="folder where you may write"):
            begin_or_claim()


@pytest.mark.parametrize("mode", [0o555, 0o700], ids=["not writable", "not even readable"])
def test_a_root_without_write_permission_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    child = os.fork()
    if child == 0:  # root may write everywhere, so the child process runs as another user
        if os.geteuid() == 0:
            os.setuid(65534)
        elif mode == 0o700:
            os._exit(0)  # a user who is not root owns the folder and may write to it
        try:
            choose_run(str(tmp_path / "runs"), "x", "MLP-Toy", None).check_writable()
        except RequestError as error:
            os._exit(0 if "ermission" in error.found else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("end", ["begun", "cannot begin"])
def test_archived_files_are_restored_if_an_attempt_is_discarded_or_cannot_begin(tmp_path, end, monkeypatch):
    begin(tmp_path)
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / "x/checkpoints" / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for archive in (lambda run: run.archive(), lambda run: run.archive_checkpoints(list(run.checkpoints.iterdir()))):
        run = RunDirectory(tmp_path / "x")
        assert archive(run).exists() and sorted(tmp_path.rglob("*")) != before
        if end == "begun":
            run.begin_attempt("a: 2")
            run.discard_attempt()
        else:
            with monkeypatch.context() as patch, pytest.raises(RequestError):
                patch.setattr("rankzero.checkpoints.atomic_files.os.fsync", Mock(side_effect=OSError("full")))
                run.begin_attempt("a: 2")
        assert sorted(tmp_path.rglob("*")) == before


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


def request(run="x", objection=""):
    return request_next_attempt(RunDirectory(Path(run)), Launch(), objection)


def test_a_scheduler_is_asked_to_requeue_the_run_unless_another_attempt_would_not_help(monkeypatch):
    """tests/system/test_slurm_stops.py uses a real scheduler."""
    assert request(objection="of this") == request() == ""  # without a scheduler
    monkeypatch.setattr(module, "requeue", lambda launch, run: f"{run} is requeued")
    for scheduler, answers in (("slurm", ["not requeued: of this", "x is requeued"]), ("lsf", ["", ""])):
        monkeypatch.setattr(module, "current_job", lambda launch, scheduler=scheduler: Mock(scheduler=scheduler))
        assert [request(objection="of this"), request()] == answers  # LSF requeues a job by its exit code


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
        ({"steps": [0, 40, 40]}, ""),
        ({"steps": [40, 40, 40], "saved": 60}, ""),  # this attempt has saved
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
