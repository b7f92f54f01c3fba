import json
import subprocess
import time
from dataclasses import asdict

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.system import process_state
from rankzero.runs.lock import Owner
from rankzero.runs.recorded_run import is_run, read_run, status_of
from recorded_runs import suspend, write_lock, write_run


def test_the_fields_of_a_run_come_from_its_files(tmp_path):
    path = write_run(tmp_path / "a", "stopped", attempts=3, age=100)
    run = read_run(path)
    assert (run.summary["status"], len(run.attempts), run.newest["host"], len(run.starts)) == ("stopped", 3, "node1", 3)
    assert run.has_newest_summary and not run.is_archived and run.problem == ""
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"attempts": [', '"attempts": [{"number": 0}, '))
    assert not read_run(path).has_newest_summary  # the summary is that of an earlier attempt


def test_the_metric_of_keep_best_is_read_from_both_kinds_of_configuration(tmp_path):
    run = write_run(tmp_path / "a")
    kept = {"keep_best: min:a/b\n": ("min", "a/b"), "trainer:\n  keep_best: 'max:val_acc'\n": ("max", "val_acc")}
    for text, expected in (kept | dict.fromkeys(("keep_best: null\n", "other_keep_best: min:a\n", ""))).items():
        (run / "config.yaml").write_text(text)
        assert read_run(run).kept_best == expected, text


def test_only_directories_with_a_record_are_runs(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert not any(is_run(tmp_path / name) for name in ("file", "folder", "missing", "file/inside", "nul\0", "n" * 300))
    run = write_run(tmp_path / "a")
    assert is_run(run)
    names = ["a.before-1", "a.before-12", "a.before-x", "a.before-1b", ".before-1"]
    assert [read_run(tmp_path / name).is_archived for name in names] == [True, True, False, False, False]


@pytest.fixture
def run(tmp_path):
    """A run without a summary."""
    return write_run(tmp_path / "a", None)


def test_a_suspended_process_is_running_with_the_command_that_resumes_it(run):
    process = subprocess.Popen(["sleep", "60"])
    try:
        suspend(process.pid)
        write_lock(run, pid=process.pid, born=process_state(process.pid)[1])
        status = status_of(read_run(run))
        assert status.word == "running" and f"kill -CONT {process.pid}" in status.note
    finally:
        process.kill()
        process.wait()


def test_the_process_that_takes_over_a_lock_counts(run):
    file = write_lock(run, pid=4_000_000, token="1" * 32)
    assert status_of(read_run(run)).word == "killed"
    file.with_name(f"{file.name}.{'1' * 32}").write_text(json.dumps(asdict(Owner.this(Launch()))))
    assert status_of(read_run(run)).word == "running"


def test_a_damaged_lock_counts_as_alive_only_for_a_minute_and_a_leftover_one_hides_no_summary(run, tmp_path):
    (tmp_path / ".a.lock").write_text("{")
    assert status_of(read_run(run)).word == "running"
    assert status_of(read_run(run), now=time.time() + 3600).note.startswith("no heartbeat of a process for ")
    failed = write_run(tmp_path / "b", "failed")
    write_lock(failed, pid=4_000_000)
    assert status_of(read_run(failed)).word == "failed"
