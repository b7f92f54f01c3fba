import os
import socket
import time

import pytest

from rankzero.commands.jobs.record import Record
from rankzero.commands.jobs.schedulers import background
from rankzero.messages import RequestError


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


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_end(record):
    wait_for(lambda: not background.state(record).is_active)


def test_a_script_runs_until_it_ends(start, tmp_path):
    record = start(f"until [ -e {tmp_path}/end ]; do sleep 0.02; done\n")
    state = background.state(record)
    assert state.is_active is True and str(state) == f"RUNNING as process {record.id}"
    (tmp_path / "end").touch()
    wait_for_end(record)
    assert background.state(record).word == "ENDED"


def test_the_output_is_appended_to_the_log(start, tmp_path):
    (tmp_path / "log").write_text("earlier\n")
    wait_for_end(start("echo out; echo err >&2\n"))
    assert (tmp_path / "log").read_text() == "earlier\nout\nerr\n"


def test_a_script_runs_in_its_own_session_without_standard_input(start, tmp_path):
    record = start("cat; echo $$ $(ps -o sid= -p $$)\n")
    wait_for_end(record)
    assert (tmp_path / "log").read_text().split() == [record.id, record.id]
    assert os.getsid(0) != int(record.id)


def test_stop_sends_sigterm_once_to_the_script(start, tmp_path):
    record = start("trap 'echo stopped; exit 75' TERM\necho ready\nwhile :; do sleep 0.02; done\n")
    wait_for(lambda: "ready" in (tmp_path / "log").read_text())
    background.stop(record)
    wait_for_end(record)
    assert (tmp_path / "log").read_text() == "ready\nstopped\n"


def test_an_ended_script_can_be_stopped_again(start):
    record = start("true\n")
    wait_for_end(record)
    background.stop(record)
    assert background.state(record).is_active is False


def test_another_process_with_the_same_id_is_not_the_job():
    record = Record("x", "local", None, str(os.getpid()), host=socket.gethostname(), started="1")
    assert background.state(record).word == "ENDED"


def test_a_process_that_does_not_exist_has_ended():
    record = Record("x", "local", None, "999999999", host=socket.gethostname(), started="1")
    assert background.state(record).is_active is False
    background.stop(record)


def test_the_exit_code_of_a_child_is_known(start):
    for line, has_failed in (("true", False), ("exit 3", True)):
        record, states = start(f"{line}\n"), []
        wait_for(
            lambda record=record, states=states: states.append(background.state(record)) or not states[-1].is_active
        )
        assert states[-1].has_failed is has_failed


def test_the_state_of_a_job_of_another_machine_is_unknown_and_stop_names_the_machine():
    record = Record("x", "local", None, "1", host="elsewhere", started="1")
    assert background.state(record).is_active is None
    assert str(background.state(record)) == "UNKNOWN (started on elsewhere)"
    with pytest.raises(RequestError) as error:
        background.stop(record)
    assert error.value.found == "it was started on elsewhere" and error.value.instead == "ssh elsewhere"
