import os
import socket
import time
from dataclasses import replace

import pytest

from rankzero.jobs.record import Record
from rankzero.jobs.schedulers import background
from running import refusal_of


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a script and returns its record; ends the scripts after the test."""
    records = []

    def start_script(text, log="log"):
        script = tmp_path / "my script.sh"
        script.write_text(text)
        pid, started = background.start(script, tmp_path / log)
        records.append(Record("x", "local", None, pid, host=socket.gethostname(), started=started))
        return records[-1]

    yield start_script
    for record in records:
        background.stop(record)
        wait_for_end(record)


def wait_for_end(record):
    """Waits until a job has ended, and returns its last state."""
    while (state := background.state(record)).is_active:
        time.sleep(0.01)
    return state


def test_a_script_runs_in_its_own_session_until_it_ends_and_can_then_be_stopped_again(start, tmp_path):
    (tmp_path / "log").write_text("earlier\n")
    wait = f"until [ -e {tmp_path}/end ]; do sleep 0.02; done"
    record = start(f"cat; echo $$ $(ps -o sid= -p $$); echo err >&2; {wait}\nexit 3\n")  # without standard input
    state = background.state(record)
    assert state.is_active is True and str(state) == f"RUNNING as process {record.id}"
    (tmp_path / "end").touch()
    state = wait_for_end(record)
    assert (state.word, state.has_failed) == ("ENDED", True)
    assert (tmp_path / "log").read_text().split() == ["earlier", record.id, record.id, "err"]
    assert os.getsid(0) != int(record.id)
    background.stop(record)
    assert background.state(record).is_active is False
    assert wait_for_end(start("true\n")).has_failed is False


def test_a_process_that_has_the_same_id_or_is_on_another_machine_is_not_the_job():
    record = Record("x", "local", None, str(os.getpid()), host=socket.gethostname(), started="1")
    assert background.state(record).word == "ENDED"
    record = replace(record, id="999999999")  # no process
    assert background.state(record).is_active is False
    background.stop(record)
    record = replace(record, host="elsewhere")
    assert background.state(record).is_active is None
    assert str(background.state(record)) == "UNKNOWN (started on elsewhere)"
    error = refusal_of(background.stop, record)
    assert error.found == "it was started on elsewhere" and error.instead == "ssh elsewhere"
