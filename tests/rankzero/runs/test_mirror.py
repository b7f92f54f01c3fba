"""The copy of a run at a URL: what is complete there, what a start downloads, and errors of the storage."""

import shutil
import threading
from functools import partial
from itertools import count
from pathlib import Path

import fsspec
import pytest
from checkpoint_files import content, names, save
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from rankzero.checkpoints.manifest import verify
from rankzero.checkpoints.write import remove_directory, write_directory
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS
from rankzero.runs.directory import RunDirectory
from rankzero.runs.mirror import Mirror
from rankzero.runs.resume import RunOptions
from rankzero.runs.stored_config import without_secrets
from running import LIMIT, TOY, fit_in_process, refusal_of, wait_until


@pytest.fixture(params=["file", "memory"])
def url(request, cwd):
    """URL of a folder that does not exist yet; in the local file system, and in memory."""
    return f"{request.param}://{cwd}/mirror"


@pytest.fixture
def memory(cwd):
    """URL of a folder in memory."""
    return f"memory://{cwd}/mirror"


def begin(*steps, name="x", **options):
    """Begins an attempt at a run in the folder `runs`, and saves checkpoints."""
    run = RunDirectory(Path("runs") / name)
    run.begin_attempt("model: {}\n", **options)
    for step in steps:
        save(run.checkpoints, step)
    return run


def mirrored(url, *steps, **options):
    """Begins an attempt, and copies it and its checkpoints; returns the mirror."""
    mirror = Mirror(url, begin(*steps, **options))
    mirror.finish(LIMIT)
    return mirror


def restored(url, launch=None, **options):
    """Downloads the run `x` as a start does, and returns it."""
    run = RunDirectory(Path("runs/x"))
    Mirror(url, run).restore(RunOptions(**options), launch or Launch())
    return run


def files(url):
    """Returns the paths of all files in the mirror of the run `x`."""
    storage, path = fsspec.url_to_fs(f"{url}/x")
    return [found[len(path) + 1 :] for found in storage.find(path)]


def complete(url):
    """Returns the steps of the checkpoints in the mirror that have a manifest."""
    found = [path.split("/") for path in files(url) if path.startswith("checkpoints/")]
    return [int(name.removeprefix("step-")) for _, name, file in found if file == "manifest.json"]


def damage(url, step):
    storage, path = fsspec.url_to_fs(f"{url}/x/checkpoints/step-{step:08d}/state.pt")
    storage.pipe_file(path, storage.cat_file(path)[:-1])


def fail(monkeypatch, method, fails):
    """Makes a method of the storage in memory raise an error as long as `fails` returns true for its path."""
    original = getattr(MemoryFileSystem, method)

    def call(self, first, second=b"", *arguments, **options):
        if fails(f"{first} {second}"):
            raise ConnectionError("no route to password=abc")
        return original(self, first, second, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, method, call)


def test_an_empty_disk_downloads_the_newest_checkpoint_and_the_small_files(url, capsys):
    run = begin(3, 6)
    written = "figures/a.png", "metrics.jsonl", "tensorboard/events.1"
    for file in (*written, "logs/rank-000.log", "attempts/0001/.temporary"):
        (run.path / file).parent.mkdir(exist_ok=True)
        (run.path / file).write_text("content")
    Mirror(url, run).finish(LIMIT)
    copied = sorted((*written, "attempts/0001/config.yaml", "config.yaml", "run.json"))
    assert complete(url) == [3, 6] and [path for path in files(url) if "checkpoints" not in path] == copied
    shutil.move("runs", "lost")
    found = restored(url)
    assert names(found.checkpoints) == ["step-00000006"]
    assert all((found.path / file).read_bytes() == (Path("lost/x") / file).read_bytes() for file in copied)
    verify(found.checkpoints / "step-00000006")
    assert not any(name.startswith(".") for name in names(found.path))
    files_line, checkpoint_line, last_line = capsys.readouterr().out.splitlines()
    assert files_line.startswith("rankzero: downloading 6 files of run x from ")
    assert checkpoint_line.startswith("rankzero: downloading step-00000006 from ") and checkpoint_line.endswith("B")
    assert last_line.startswith("rankzero: downloaded run x in ")


def test_a_pruned_checkpoint_stays_in_the_mirror_until_a_newer_one_is_complete(memory, monkeypatch, scale_timers):
    scale_timers(0.01)
    mirror = mirrored(memory, 3, 6)
    remove_directory(mirror.run.checkpoints / "step-00000003")
    save(mirror.run.checkpoints, 9)
    is_broken = threading.Event()
    is_broken.set()
    fail(monkeypatch, "pipe_file", lambda path: is_broken.is_set() and path.startswith(f"{Path.cwd()}/mirror/x/ch"))
    mirror.copy()
    wait_until(lambda: mirror._error)
    assert complete(memory) == [3, 6] and "checkpoints/step-00000009/state.pt" in files(memory)
    shutil.rmtree("runs")
    assert names(restored(memory).checkpoints) == ["step-00000006"]  # half a copy does not count
    save(mirror.run.checkpoints, 9)
    is_broken.clear()
    mirror.finish(LIMIT)
    assert complete(memory) == [6, 9]


def test_errors_of_the_storage_are_reported_once_and_the_copy_succeeds_later(memory, monkeypatch, capsys, caplog):
    monkeypatch.setattr(TIMERS, "slow_poll", 0.01)
    mirror = Mirror(memory, begin(3))
    calls = count()
    fail(monkeypatch, "put_file", lambda path: next(calls) < 4)
    mirror.finish(LIMIT)
    assert complete(memory) == [3] and next(calls) > 4
    printed = capsys.readouterr()
    text = f"the copy to {memory}/x failed: ConnectionError: no route to password=...; the run continues"
    assert printed.err.count("\n") == 1 and text in printed.err and text in caplog.text
    assert printed.out == f"rankzero: copied to {memory}/x, which works again\n"


def test_a_mirror_that_is_not_up_to_date_at_the_end_is_reported(memory, monkeypatch, scale_timers, capsys):
    mirror = mirrored(memory, 3)
    save(mirror.run.checkpoints, 6)
    released = threading.Event()
    fail(monkeypatch, "put_file", lambda path: not released.wait(LIMIT))  # neither an error nor an end
    mirror.finish(0.1)
    released.set()
    text = f"{memory}/x is not up to date: the last copy did not end within 0.1 s; its newest complete checkpoint is "
    assert f"{text}step-00000003; the same command on this disk copies the rest" in capsys.readouterr().err
    wait_until(lambda: mirror._thread is None)
    scale_timers(0.001)
    fail(monkeypatch, "put_file", lambda path: True)
    mirror = Mirror(memory, begin(9))
    mirror.finish(LIMIT)
    assert "is not up to date: ConnectionError: no route" in capsys.readouterr().err
    mirror.finish(LIMIT)
    assert capsys.readouterr().err == ""  # waits and reports once


def test_a_resumed_run_removes_older_checkpoints_only_after_it_has_copied_a_newer_one(url):
    mirrored(url, 3, 6)
    shutil.rmtree("runs")
    run = RunDirectory(Path("runs/x"))
    mirror = Mirror(url, run)
    mirror.restore(RunOptions(), Launch())
    run.begin_attempt("model: {}\n")
    mirror.finish(LIMIT)
    assert names(run.checkpoints) == ["step-00000006"] and complete(url) == [3, 6]
    save(run.checkpoints, 9)
    mirror.finish(LIMIT)
    assert complete(url) == [6, 9]


def test_the_newest_checkpoint_is_copied_first_and_its_manifest_after_the_small_files(memory, monkeypatch):
    mirror, written = Mirror(memory, begin(3, 6)), []
    for method in ("put_file", "pipe_file"):
        fail(monkeypatch, method, written.append)
    mirror.finish(LIMIT)
    ends = ["6/state.pt", "/run.json", "6/manifest.json", "3/state.pt"]
    positions = [next(number for number, path in enumerate(written) if end in path) for end in ends]
    assert positions == sorted(positions)


def test_a_checkpoint_that_is_pruned_while_it_is_copied_is_left_out(memory, monkeypatch):
    mirror = Mirror(memory, begin(3, 6))

    def prune(path):
        if "step-00000006/state.pt" in path and not (mirror.run.checkpoints / "step-00000009").exists():
            save(mirror.run.checkpoints, 9)
            remove_directory(mirror.run.checkpoints / "step-00000006")

    fail(monkeypatch, "put_file", prune)
    mirror.finish(LIMIT)
    assert complete(memory) == [3, 9] and not any("00006" in path for path in files(memory))


def test_a_step_that_is_saved_again_replaces_its_copy(url):
    mirror = mirrored(url, 3)
    save(mirror.run.checkpoints, 3, again=True)
    mirror.finish(LIMIT)
    shutil.move("runs", "lost")
    assert complete(url) == [3] and len([path for path in files(url) if path.startswith("checkpoints")]) == 2
    state = Path("checkpoints/step-00000003/state.pt")
    assert (restored(url).path / state).read_bytes() == (Path("lost/x") / state).read_bytes()


def test_newer_checkpoints_from_which_a_run_does_not_resume_do_not_count_any_more(url):
    run = mirrored(url, 3, 6).run
    run.archive_checkpoints([run.checkpoints / "step-00000006"])
    run = begin()
    mirror = Mirror(url, run)
    mirror.restore(RunOptions(resume="runs/x/checkpoints/step-00000003"), Launch())
    shutil.rmtree(run.checkpoints / "step-00000006")
    mirror.finish(LIMIT)
    assert complete(url) == [3] and "checkpoints.before-2/step-00000006/state.pt" in files(url)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(url, capsys):
    mirrored(url, 3, 6, 9)
    damage(url, 9)
    damage(url, 6)
    shutil.rmtree("runs")
    assert names(restored(url).checkpoints) == ["step-00000003"]
    skipped = f"rankzero: skipped: {url}/x/checkpoints/step-0000000"
    assert [line[: len(skipped) + 1] for line in capsys.readouterr().err.splitlines()] == [skipped + "9", skipped + "6"]


def test_the_best_checkpoint_is_downloaded_too(memory):
    run = begin()
    for step, loss in ((3, 0.1), (6, 0.5), (9, 0.3)):
        save(run.checkpoints, step, rankzero={"metrics": {"loss": loss}})
    Mirror(memory, run).finish(LIMIT)
    shutil.rmtree("runs")
    assert names(restored(memory, keep_best="min:loss").checkpoints) == ["step-00000003", "step-00000009"]


def test_a_disk_with_an_older_checkpoint_downloads_the_newer_one_and_other_disks_nothing(url, capsys):
    mirror = mirrored(url, 3)
    shutil.copytree("runs", "older")
    save(mirror.run.checkpoints, 6)
    mirror.finish(LIMIT)
    restored(url)
    assert capsys.readouterr().out == ""
    shutil.rmtree("runs")
    shutil.move("older", "runs")
    assert names(restored(url).checkpoints) == ["step-00000003", "step-00000006"]


def test_each_part_of_a_run_downloads_its_own_newest_checkpoint_and_leaves_later_parts_in_the_mirror(memory):
    run = begin(3)
    run.part = 2
    write_directory(content(6), run.checkpoint(6))
    Mirror(memory, run).finish(LIMIT)
    shutil.rmtree("runs")
    run = RunDirectory(Path("runs/x"))
    for part, newest in ((1, "step-00000003"), (2, "part-2-step-00000006")):
        run.part = part
        mirror = Mirror(memory, run)
        mirror.restore(RunOptions(), Launch())
        mirror.finish(LIMIT)  # of a part that is already finished
        assert newest in names(run.checkpoints) and len(names(run.checkpoints)) == part
        assert "checkpoints/part-2-step-00000006/manifest.json" in files(memory)


def test_another_run_of_the_same_name_is_refused(url):
    mirrored(url, 3)
    shutil.rmtree("runs")
    begin(6)
    before = files(url)
    error = refusal_of(restored, url)
    assert error.asked == f"run x with --mirror {url}" and "runs/x is another run" in error.found
    assert error.instead == "--name ANOTHER-NAME, or another --mirror URL"
    assert error.found.startswith(f"{url}/x contains a run that was created at 20")
    assert files(url) == before and names(Path("runs/x/checkpoints")) == ["step-00000006"]


def test_resume_never_is_refused_if_the_mirror_has_the_run_except_in_a_restarted_job(memory):
    mirrored(memory, 3, job_id="7")
    shutil.rmtree("runs")
    assert "--resume auto" in refusal_of(partial(restored, memory, resume="never")).instead
    assert not Path("runs").exists()
    assert restored(memory, Launch(job_id="7", restarts=1), resume="never").exists


def test_a_storage_that_cannot_be_read_is_refused_and_not_taken_for_an_empty_one(memory, monkeypatch):
    mirrored(memory, 3)
    shutil.rmtree("runs")
    fail(monkeypatch, "cat_file", lambda path: True)
    error = refusal_of(restored, memory)
    assert error.found == "ConnectionError: no route to password=..." and error.instead == "the same command again"


def test_a_url_that_cannot_be_used_is_refused_and_secrets_are_hidden(cwd, monkeypatch):
    (cwd / "file").write_text("")
    run = RunDirectory(Path("runs/x"))
    assert refusal_of(Mirror, "file/folder", run).found.startswith("NotADirectoryError: ")
    monkeypatch.setitem(known_implementations, "far", {"class": "far_away.Far", "err": "Install far_away"})
    error = refusal_of(Mirror, "far://me:abc@host/runs?sig=abc", run)
    assert error.asked == "--mirror far://me:...@host/runs?sig=..." and error.instead == "pip install far_away"
    assert without_secrets({"mirror": "far://me:abc@host"}) == {"mirror": "far://me:...@host"}
    assert not Path("runs").exists()


def test_a_newer_attempt_ends_the_copies_of_the_earlier_one(memory):
    mirror = mirrored(memory, 3)
    save(begin().checkpoints, 6)
    mirror.finish(LIMIT)
    assert complete(memory) == [3]


def test_fit_needs_a_name_and_resumes_on_an_empty_disk_where_it_ended(cwd, capsys):
    arguments = (*TOY, "--mirror", "mirror", "--epochs")
    error = refusal_of(fit_in_process, *arguments, "1")
    assert (error.asked, error.instead) == ("--mirror mirror", "--name NAME --mirror mirror")
    fit_in_process(*arguments, "1", "--name", "x")
    assert {"report.html", "summary.json", "run.json"} <= {*names(cwd / "mirror/x")}
    rows = (cwd / "runs/x/metrics.jsonl").read_bytes()
    shutil.rmtree("runs")
    capsys.readouterr()
    fit_in_process(*arguments, "2", "--name", "x")
    assert "run runs/x, resuming from step-00000064" in capsys.readouterr().out
    assert (cwd / "runs/x/metrics.jsonl").read_bytes().startswith(rows)
    assert complete("mirror") == [110, 120, 128] and "mirror" not in (cwd / "runs/x/config.yaml").read_text()
    shutil.rmtree("mirror")
    fit_in_process(*arguments, "2", "--name", "x")  # finished: trains nothing, but copies
    assert complete("mirror") == [110, 120, 128]
