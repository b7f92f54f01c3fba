import json
import subprocess
import time
from dataclasses import asdict

import pytest

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.process_state import process_state
from rankzero.runs.lock import Owner
from rankzero.runs.reports.recorded.recorded_run import read_run
from rankzero.runs.reports.recorded.run_status import status_of
from recorded_runs import locked, suspend, write_lock, write_run


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


def test_a_run_behind_a_symbolic_link_has_the_status_of_its_directory(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link").symlink_to(run)
    with locked(run):
        assert status_of(read_run(tmp_path / "elsewhere/link")).word == "running"
