import json
import os
import socket
import time

import pytest

from rankzero.commands.jobs import follow as module
from rankzero.commands.jobs.follow import LogReader, follow
from rankzero.commands.jobs.record import Record, record_path, write_record
from rankzero.commands.jobs.request.job_request import JobRequest
from rankzero.commands.jobs.schedulers.state import State
from rankzero.commands.jobs.submission import submit
from rankzero.distributed.timers import TIMERS
from rankzero.messages import Exit

RECORD = Record("x", "slurm", "srun", "123")
STOP = "python launch/submit.py stop x"


@pytest.fixture
def states(monkeypatch):
    """Replaces the scheduler by a list of states, one per query; an action may precede a state."""
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0)
    monkeypatch.setattr(module, "LOG_SECONDS", 0)
    answers = []

    def job_state(record):
        answer = answers.pop(0)
        if callable(answer):
            answer(record)
            answer = answers.pop(0)
        return answer

    monkeypatch.setattr(module, "job_state", job_state)
    return answers


RUNNING, ENDED = State("RUNNING", True, "on n1"), State("COMPLETED", False, has_failed=False)


def write_summary(root, name="x", seconds=0.0, **values):
    (root / name).mkdir(exist_ok=True)
    (root / name / "summary.json").write_text(json.dumps(values))
    moment = record_path(root, "x").stat().st_mtime + seconds
    os.utime(root / name / "summary.json", (moment, moment))


def test_a_reader_returns_what_was_added(tmp_path):
    log = tmp_path / "x.job.log"
    reader = LogReader(tmp_path, "x", False)
    assert reader.read() == ""
    log.write_text("a\n")
    assert reader.read() == "a\n"
    with log.open("a") as file:
        file.write("b\nc")
    assert (reader.read(), reader.read()) == ("b\nc", "")
    reader.close()


@pytest.mark.parametrize(("skip", "text"), [(True, "new"), (False, "oldnew")])
def test_a_reader_skips_the_output_of_earlier_jobs_on_request(tmp_path, skip, text):
    log = tmp_path / "x.job.log"
    log.write_text("old")
    reader = LogReader(tmp_path, "x", False, skip)
    with log.open("a") as file:
        file.write("new")
    assert reader.read() == text
    reader.close()


def test_a_reader_finds_the_new_log_of_a_job_of_pbs(tmp_path):
    log = tmp_path / "x.job.log"
    log.write_text("first\n")
    reader = LogReader(tmp_path, "x", False, skip=False)
    assert reader.read() == "first\n"
    log.rename(tmp_path / "x.job.log.15.pbs1")
    assert reader.read() == ""
    log.write_text("second\n")
    assert reader.read() == "second\n"
    reader.close()


def test_a_reader_returns_the_end_of_a_renamed_log(tmp_path):
    log = tmp_path / "x.job.log"
    log.write_text("begin\n")
    reader = LogReader(tmp_path, "x", False, skip=False)
    assert reader.read() == "begin\n"
    with log.open("a") as file:
        file.write("end\n")
    log.rename(tmp_path / "x.job.log.15.pbs1")
    log.write_text("second\n")
    assert reader.read() == "end\nsecond\n"
    reader.close()


def test_a_reader_starts_again_in_a_log_that_was_emptied(tmp_path):
    log = tmp_path / "x.job.log"
    log.write_text("a long first output\n")
    reader = LogReader(tmp_path, "x", False, skip=False)
    reader.read()
    log.write_text("second\n")
    assert reader.read() == "second\n"
    reader.close()


def test_a_reader_joins_the_bytes_of_a_character(tmp_path):
    log, text = tmp_path / "x.job.log", "a │ b\n".encode()
    reader = LogReader(tmp_path, "x", False)
    with log.open("wb", buffering=0) as file:
        file.write(text[:3])
        first = reader.read()
        file.write(text[3:])
    assert first + reader.read() == "a │ b\n"
    reader.close()


def test_a_reader_reads_one_log_per_member_of_an_array(tmp_path):
    (tmp_path / "x.job-0.log").write_text("zero\n")
    reader = LogReader(tmp_path, "x", True, skip=False)
    (tmp_path / "x.job-1.log").write_text("one\n")
    (tmp_path / "x.job.log").write_text("not of the array\n")
    assert reader.read() == "zero\none\n"
    reader.close()


def test_a_reader_replaces_bytes_that_are_not_text(tmp_path):
    (tmp_path / "x.job.log").write_bytes(b"a\xffb\n")
    reader = LogReader(tmp_path, "x", False, skip=False)
    assert reader.read() == "a\ufffdb\n"
    reader.close()


def test_each_change_of_state_is_printed_once_and_the_log_as_it_grows(tmp_path, states, capsys):
    write_record(tmp_path, RECORD)
    log = tmp_path / "x.job.log"
    pending = State("PENDING", True, "(Resources)")
    states += [
        pending,
        pending,
        lambda record: log.write_text("step 1\n"),
        State("RUNNING", True, "on n1, 0:01 of 1:00"),
    ]
    states += [State("RUNNING", True, "on n1, 0:03 of 1:00"), lambda record: log.write_text("step 1\nstep 2\n"), ENDED]
    reader = LogReader(tmp_path, "x", False)
    follow(tmp_path, RECORD, reader, STOP)
    assert capsys.readouterr().out == (
        "rankzero: job 123: PENDING (Resources)\nrankzero: job 123: RUNNING on n1, 0:01 of 1:00\nstep 1\n"
        "step 2\nrankzero: job 123: COMPLETED\n"
    )


@pytest.mark.parametrize(
    ("values", "seconds", "code"),
    [
        ({"status": "finished"}, 5, Exit.FINISHED),
        ({"status": "finished"}, -5, Exit.FINISHED),  # had finished before; the job found nothing to do
        ({"status": "stopped"}, 5, Exit.STOPPED),
        ({"status": "stopped"}, -5, Exit.FAILED),
        ({"status": "failed"}, 5, Exit.FAILED),
        ({"status": "running"}, 5, Exit.FAILED),
        ({}, 5, Exit.FAILED),
    ],
)
def test_the_exit_code_is_that_of_the_run(tmp_path, states, values, seconds, code):
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, seconds=seconds, **values)
    states.append(ENDED)
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == code


@pytest.mark.parametrize("failed", [True, False, None])
def test_an_earlier_finished_run_does_not_hide_a_failed_job(tmp_path, states, failed):
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, seconds=-5, status="finished")
    states.append(State("FAILED" if failed else "COMPLETED", False, has_failed=failed))
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == (Exit.FAILED if failed else Exit.FINISHED)


def test_an_attempt_without_a_summary_has_failed(tmp_path, states):
    """The first attempt was stopped; the second one ended before it could write a summary."""
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, seconds=5, status="stopped")
    (tmp_path / "x" / "run.json").touch()
    moment = record_path(tmp_path, "x").stat().st_mtime + 10
    os.utime(tmp_path / "x" / "run.json", (moment, moment))
    states.append(State("FAILED", False, has_failed=True))
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == Exit.FAILED


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_job_without_a_valid_summary_has_failed(tmp_path, states, text):
    write_record(tmp_path, RECORD)
    (tmp_path / "x").mkdir()
    if text is not None:
        (tmp_path / "x" / "summary.json").write_text(text)
    states.append(ENDED)
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == Exit.FAILED


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["finished", "finished"], Exit.FINISHED),
        (["finished", "stopped"], Exit.STOPPED),
        (["stopped", "failed"], Exit.STOPPED),
        (["failed", "stopped"], Exit.FAILED),
        (["finished"], Exit.FAILED),
        ([], Exit.FAILED),
    ],
)
def test_the_exit_code_of_an_array_is_that_of_its_first_unfinished_member(tmp_path, states, statuses, code):
    record = Record("x", "slurm", "srun", "123", "0-1")
    write_record(tmp_path, record)
    write_summary(tmp_path, "x-old", seconds=5, status="failed")  # another run
    for index, status in enumerate(statuses):
        write_summary(tmp_path, f"x-{index}", seconds=5, status=status)
    states.append(ENDED)
    assert follow(tmp_path, record, LogReader(tmp_path, "x", True), STOP) == code


def test_the_next_job_of_pbs_is_followed(tmp_path, states, capsys):
    record = Record("x", "pbs", "pbsdsh", "15.pbs1")
    write_record(tmp_path, record)
    submitted_again = (tmp_path / ".x.job.next").write_text
    states += [RUNNING, lambda asked: submitted_again("16.pbs1\n"), RUNNING, State("QUEUED", True), ENDED]
    follow(tmp_path, record, LogReader(tmp_path, "x", False), STOP)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [" job 15.pbs1", " job 16.pbs1", " job 16.pbs1"]


def test_a_scheduler_that_does_not_answer_does_not_end_the_output(tmp_path, states, capsys):
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, seconds=5, status="finished")
    states += [RUNNING, State("UNKNOWN", None, "(no answer within 10 s)"), RUNNING, ENDED]
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == 0
    assert "UNKNOWN (no answer within 10 s)" in capsys.readouterr().out


def test_an_interrupt_ends_the_output_but_not_the_job(tmp_path, states, capsys):
    def interrupt(record):
        raise KeyboardInterrupt

    states += [RUNNING, interrupt]
    assert follow(tmp_path, RECORD, LogReader(tmp_path, "x", False), STOP) == 130
    assert "job 123 continues; to stop it: python launch/submit.py stop x" in capsys.readouterr().err


def test_a_local_job_is_followed_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.02)
    monkeypatch.setattr(module, "LOG_SECONDS", 0.01)
    text = 'echo one; sleep 0.1; echo two; mkdir runs/x; echo \'{"status": "stopped"}\' >runs/x/summary.json\n'
    reader = LogReader(tmp_path / "runs", "x", False)
    record = submit(JobRequest("local", "x"), f"cd {tmp_path}\n{text}", tmp_path)
    assert record.host == socket.gethostname()
    begin = time.monotonic()
    assert follow(tmp_path / "runs", record, reader, STOP) == Exit.STOPPED
    assert time.monotonic() - begin < 20
    out = capsys.readouterr().out
    assert f"rankzero: job {record.id}: ENDED\n" in out and out.index("one\n") < out.index("two\n")
