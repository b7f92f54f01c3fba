import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankzero.messages import RequestError, TakenOverError
from rankzero.runs.directory import RunDirectory, choose_run


def begin(root, name="x", text="a: 1", job=None):
    run = choose_run(str(root), name, "MLP-Toy", job)
    run.begin_attempt(text)
    return run


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_unnamed_and_archived_runs_are_numbered_and_a_job_finds_its_own_run_again(tmp_path):
    assert [begin(tmp_path, None).name for _ in range(3)] == ["MLP-Toy-1", "MLP-Toy-2", "MLP-Toy-3"]
    first = begin(tmp_path, None, job="4711")
    second = choose_run(str(tmp_path), None, "MLP-Toy", "4711")
    assert second.path == first.path == tmp_path / "MLP-Toy-4711" and second.exists
    for _ in range(2):
        begin(tmp_path).archive()
    assert sorted(path.name for path in tmp_path.glob("x*")) == ["x.before-1", "x.before-2"]


def test_concurrent_starts_never_share_a_number(tmp_path):
    runs = [choose_run(str(tmp_path), None, "MLP-Toy", None) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda run: run.begin_attempt("a: 1"), runs))
    assert len({run.path for run in runs}) == 8
    assert all(len(run.read("run.json")["attempts"]) == 1 for run in runs)


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
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="is a file"):
            choose_run(str(root), None, "MLP-Toy", None).check_writable()
    with pytest.raises(RequestError, match="folder where you may write"):
        choose_run("/proc/runs", None, "MLP-Toy", None).begin_attempt("a: 1")


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
    def refuse(descriptor):
        raise OSError("full")

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
                patch.setattr("rankzero.runs.checkpoints.atomic_files.os.fsync", refuse)
                run.begin_attempt("a: 2")
        assert sorted(tmp_path.rglob("*")) == before
