import os
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from rankzero.distributed.timers import TIMERS
from rankzero.jobs import follow as module
from rankzero.jobs.follow import LogReader, follow, run_result
from rankzero.jobs.record import Record, State, record_path, write_record
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


def write_summary(root, name="x", seconds=5, text='{"status": "stopped"}'):
    (root / name).mkdir(exist_ok=True)
    if text is not None:
        (root / name / "summary.json").write_text(text)
        moment = record_path(root, "x").stat().st_mtime + seconds
        os.utime(root / name / "summary.json", (moment, moment))


def followed(root, record=RECORD):
    """Follows a job to its end, and returns the exit code."""
    with closing(LogReader(root, "x", record.array is not None)) as reader:
        return follow(root, record, reader, STOP)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "x.job.log"


def append(log, content):
    with log.open("ab") as file:
        file.write(content)


@pytest.fixture
def reader_of(tmp_path):
    """Returns a function that creates a reader of the logs, which is closed after the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(closing(LogReader(tmp_path, "x", *arguments)))


def test_a_reader_returns_what_was_added_also_after_the_log_was_emptied(reader_of, log):
    reader = reader_of(False)
    assert reader.read() == ""
    for added, text in ((b"a\n", "a\n"), (b"b\nc", "b\nc"), (b"", ""), (b"\xff\n", "\ufffd\n")):
        append(log, added)
        assert reader.read() == text
    character = "a │ b\n".encode()
    append(log, character[:3])
    first = reader.read()
    append(log, character[3:])
    assert first + reader.read() == "a │ b\n"
    log.write_text("second\n")
    assert reader.read() == "second\n"


def test_a_reader_skips_the_output_of_earlier_jobs_on_request_and_reads_one_log_per_member(reader_of, tmp_path, log):
    append(log, b"old")
    readers = [reader_of(False, skip) for skip in (True, False)]
    append(log, b"new")
    assert [reader.read() for reader in readers] == ["new", "oldnew"]
    append(tmp_path / "x.job-0.log", b"zero\n")
    reader = reader_of(True, False)
    append(tmp_path / "x.job-1.log", b"one\n")
    assert reader.read() == "zero\none\n"


@pytest.mark.parametrize("end", ["", "end\n"])
def test_a_reader_returns_the_end_of_a_renamed_log_and_the_new_log_of_a_job_of_pbs(reader_of, log, end):
    append(log, b"begin\n")
    reader = reader_of(False, False)
    assert reader.read() == "begin\n"
    append(log, end.encode())
    log.rename(f"{log}.15.pbs1")
    assert end or reader.read() == ""
    append(log, b"second\n")
    assert reader.read() == f"{end}second\n"


def test_each_change_of_state_is_printed_once_and_the_log_as_it_grows(tmp_path, states, log, capsys, monkeypatch):
    monkeypatch.setattr(TIMERS, "scheduler_pause", 0.02)  # the log is also read between two queries
    write_record(tmp_path, RECORD)
    pending = State("PENDING", True, "(Resources)")
    states += [pending, pending, lambda record: log.write_text("step 1\n")]
    states += [State("RUNNING", True, "on n1, 0:01 of 1:00"), State("RUNNING", True, "on n1, 0:03 of 1:00")]
    states += [lambda record: log.write_text("step 1\nstep 2\n"), ENDED]
    followed(tmp_path)
    assert capsys.readouterr().out == (
        "rankzero: job 123: PENDING (Resources)\nrankzero: job 123: RUNNING on n1, 0:01 of 1:00\nstep 1\n"
        "step 2\nrankzero: job 123: COMPLETED\n"
    )


FAILED = State("FAILED", False, has_failed=True)


@pytest.mark.parametrize(
    ("summary", "seconds", "state", "code"),
    [
        ('{"status": "finished"}', 5, ENDED, Exit.FINISHED),
        ('{"status": "finished"}', -5, ENDED, Exit.FINISHED),  # had finished before; the job found nothing to do
        ('{"status": "finished"}', -5, State("COMPLETED", False, has_failed=None), Exit.FINISHED),
        ('{"status": "finished"}', -5, FAILED, Exit.FAILED),
        ('{"status": "stopped"}', 5, ENDED, Exit.STOPPED),
        ('{"status": "stopped"}', -5, ENDED, Exit.FAILED),
        ('{"status": "failed"}', 5, ENDED, Exit.FAILED),
        ('{"status": "running"}', 5, ENDED, Exit.FAILED),
        *((text, 5, ENDED, Exit.FAILED) for text in (None, "", "{", "[]", "{}")),
    ],
)
def test_the_exit_code_is_that_of_the_run(tmp_path, states, summary, seconds, state, code):
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, seconds=seconds, text=summary)
    states.append(state)
    assert followed(tmp_path) == code


def test_an_attempt_without_a_summary_has_failed(tmp_path, states):
    """The first attempt was stopped; the second one ended before it could write a summary."""
    write_record(tmp_path, RECORD)
    write_summary(tmp_path)
    (tmp_path / "x" / "run.json").touch()
    moment = record_path(tmp_path, "x").stat().st_mtime + 10
    os.utime(tmp_path / "x" / "run.json", (moment, moment))
    states.append(FAILED)
    assert followed(tmp_path) == Exit.FAILED


def test_the_next_job_of_pbs_is_followed(tmp_path, states, capsys):
    record = Record("x", "pbs", "pbsdsh", "15.pbs1")
    write_record(tmp_path, record)
    submitted_again = (tmp_path / ".x.job.next").write_text
    states += [RUNNING, lambda asked: submitted_again("16.pbs1\n"), RUNNING, State("QUEUED", True), ENDED]
    followed(tmp_path, record)
    jobs = [line.split(":")[1].split()[1] for line in capsys.readouterr().out.splitlines()]
    assert jobs == ["15.pbs1", "16.pbs1", "16.pbs1"]


@pytest.mark.parametrize(
    ("statuses", "code", "result"),
    [
        (["finished", "finished"], Exit.FINISHED, "2 finished"),
        (["finished", "stopped"], Exit.STOPPED, "1 finished, 1 stopped"),
        (["stopped", "failed"], Exit.STOPPED, "1 stopped, 1 failed"),
        (["failed", "stopped"], Exit.FAILED, "1 failed, 1 stopped"),
        (["finished"], Exit.FAILED, "1 finished, 1 failed"),
        ([], Exit.FAILED, "2 failed"),
    ],
)
def test_the_exit_code_of_an_array_is_that_of_its_first_unfinished_member(tmp_path, states, statuses, code, result):
    record = Record("x", "slurm", "srun", "123", "0-1")
    write_record(tmp_path, record)
    write_summary(tmp_path, "x-old", text='{"status": "failed"}')  # another run
    for index, status in enumerate(statuses):
        write_summary(tmp_path, f"x-{index}", text=f'{{"status": "{status}"}}')
    states.append(ENDED)
    assert followed(tmp_path, record) == code
    assert run_result(tmp_path, record, ENDED) == f"of 2 runs, {result}"


def test_a_member_of_an_array_that_had_finished_before_has_the_result_of_its_own_job(tmp_path, states):
    record, asked = Record("x", "pbs", "pbsdsh", "15[].pbs1", "0-1"), []
    write_record(tmp_path, record)
    for member, state in (("x-0", ENDED), ("x-1", FAILED)):
        write_summary(tmp_path, member, -5, '{"status": "finished"}')
        states += [lambda record: asked.append(record.id), state]
    assert run_result(tmp_path, record, FAILED) == "of 2 runs, 1 finished, 1 failed"
    assert asked == ["15[0].pbs1", "15[1].pbs1"]


def test_a_scheduler_that_does_not_answer_does_not_end_the_output(tmp_path, states, capsys):
    write_record(tmp_path, RECORD)
    write_summary(tmp_path, text='{"status": "finished"}')
    states += [RUNNING, State("UNKNOWN", None, "(no answer within 10 s)"), RUNNING, ENDED]
    assert followed(tmp_path) == 0
    assert "UNKNOWN (no answer within 10 s)" in capsys.readouterr().out


def test_an_interrupt_ends_the_output_but_not_the_job(tmp_path, states, capsys):
    states += [RUNNING, Mock(side_effect=KeyboardInterrupt)]
    assert followed(tmp_path) == 130
    assert "job 123 continues; to stop it: python launch/submit.py stop x" in capsys.readouterr().err
