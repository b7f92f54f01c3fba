import json
import signal
import subprocess
import time
from dataclasses import asdict

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.process_state import process_state
from rankzero.runs.lock import Owner
from rankzero.runs.reports.recorded.recorded_run import read_run
from rankzero.runs.reports.recorded.run_status import status_of
from recorded_runs import locked, write_lock, write_run


def test_a_suspended_process_is_running_with_the_command_that_resumes_it(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        while process_state(process.pid)[0] != "T":
            time.sleep(0.01)
        run = write_run(tmp_path / "a", None)
        write_lock(run, pid=process.pid, born=process_state(process.pid)[1])
        status = status_of(read_run(run))
        assert status.word == "running" and f"kill -CONT {process.pid}" in status.note
    finally:
        process.kill()
        process.wait()


def test_the_process_that_takes_over_a_lock_counts(tmp_path):
    run = write_run(tmp_path / "a", None)
    file = write_lock(run, pid=4_000_000, token="1" * 32)
    assert status_of(read_run(run)).word == "killed"
    file.with_name(f"{file.name}.{'1' * 32}").write_text(json.dumps(asdict(Owner.this(Launch()))))
    assert status_of(read_run(run)).word == "running"


def test_a_damaged_lock_counts_as_alive_only_for_a_minute(tmp_path):
    run = write_run(tmp_path / "a", None)
    (tmp_path / ".a.lock").write_text("{")
    assert status_of(read_run(run)).word == "running"
    assert status_of(read_run(run), now=time.time() + 3600).note.startswith("no heartbeat of a process for ")


def test_a_leftover_lock_does_not_hide_the_newest_summary(tmp_path):
    run = write_run(tmp_path / "a", "failed")
    write_lock(run, pid=4_000_000)
    assert status_of(read_run(run)).word == "failed"


def test_a_run_behind_a_symbolic_link_has_the_status_of_its_directory(tmp_path):
    run = write_run(tmp_path / "real/a", None)
    (tmp_path / "link").symlink_to(run)
    with locked(run):
        assert status_of(read_run(tmp_path / "link")).word == "running"
