"""Queries and requests of a task to a real Slurm: the end of the job, and the requeue."""

import subprocess

import pytest

from running import BIN, run
from system.slurm import run_slurm_command, start, submit, wait_for, wait_until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.soak]

TASK_HEADER = """\
import os, signal, sys, time
from rankzero.distributed.scheduler.job import end_of_allocation
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.scheduler.requeue import requeue
launch = detect()
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
"""


@pytest.fixture
def task(tmp_path):
    """Returns a function that writes the code of a task to a file, and returns the command that runs it."""

    def write(text):
        (tmp_path / "task.py").write_text(TASK_HEADER + text)
        return f"{BIN}/python -u {tmp_path}/task.py"

    return write


@pytest.fixture
def job(tmp_path, task, slurm):
    """Returns a function that writes a job script, and returns its file."""

    def write(text):
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/sh\nsrun --ntasks=1 {task(text)}\necho exited with code $?\n")
        return script

    return write


@pytest.mark.parametrize(("limit", "minimum", "maximum"), [("5", 240, 301), ("1-00:00:00", 86000, 86401)])
def test_the_end_of_a_job_follows_from_its_time_limit(slurm, tmp_path, task, limit, minimum, maximum):
    command = task("print(end_of_allocation(launch) - time.time())").split()
    result = run("srun", f"--time={limit}", "--ntasks=1", *command, folder=tmp_path, environment=slurm)
    assert minimum < float(result.out) < maximum


def test_a_job_without_a_limit_has_no_end_and_an_interactive_job_is_not_requeued(slurm, tmp_path, task):
    command = task("print(end_of_allocation(launch), requeue(launch).requeue.name)").split()
    result = run("srun", "--ntasks=1", *command, folder=tmp_path, environment=slurm)
    assert result.out.split() == ["None", "NO_JOB"]


def test_a_job_is_requeued(slurm, job):
    script = job(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends the step before `requeue` returns\n"
        "print('attempt', attempt, requeue(launch) if attempt == '0' else '', flush=True)\n"
        "time.sleep(1)"
    )
    _, printed = submit(script, slurm)
    assert "attempt 0 Outcome(requeue=<Requeue.DONE" in printed and "attempt 1" in printed
    assert "exited with code 0" in printed.partition("attempt 1")[2]


def test_a_member_of_a_job_array_requeues_only_itself(slurm, tmp_path, job):
    # The last member has the job id of the array.
    script = job(
        "index = os.environ['SLURM_ARRAY_TASK_ID']\n"
        "print('member', index, 'attempt', attempt, flush=True)\n"
        "if attempt == '0' and index == '2': requeue(launch)\n"
        "time.sleep(3)"
    )
    array = start(script, slurm, "--array=1-2", f"--output={tmp_path}/%A.out")
    printed = wait_for(array, tmp_path, slurm)
    assert sorted(line for line in printed.splitlines() if line.startswith("member")) == [
        "member 1 attempt 0",
        "member 2 attempt 0",
        "member 2 attempt 1",
    ]


REQUEUE_ON_SIGTERM = """\
def stop(*_):
    outcome = requeue(launch, "my-run")
    print(outcome.requeue.name, outcome.message, flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def interrupt(slurm, tmp_path):
    """Returns a function that interrupts a job once its task handles signals, and returns its id and its output."""

    def run_job(script, *command, options=()):
        job_id = start(script, slurm, *options)
        output = tmp_path / f"{job_id}.out"
        wait_until(lambda: output.exists() and "ready" in output.read_text(), f"job {job_id}")
        run_slurm_command(*command, job_id, environment=slurm)
        return job_id, wait_for(job_id, tmp_path, slurm)

    return run_job


def test_a_job_that_the_user_cancels_is_not_requeued(slurm, job, interrupt):
    job_id, printed = interrupt(job(REQUEUE_ON_SIGTERM), "scancel")
    assert f"ENDING job {job_id} is COMPLETING" in printed and printed.count("ready") == 1
    process = subprocess.run(["scontrol", "show", "job", job_id], env=slurm, capture_output=True, text=True)
    assert "JobState=CANCELLED" in process.stdout


def test_a_job_that_slurm_requeues_is_not_requeued_twice(job, interrupt):
    script = job("if attempt == '1': sys.exit(print('once more'))\n" + REQUEUE_ON_SIGTERM)
    job_id, printed = interrupt(script, "scontrol", "requeue")
    assert f"ENDING Slurm has already requeued job {job_id}" in printed and "once more" in printed


def test_a_refused_requeue_prints_the_command_to_type(job, interrupt):
    script = job(REQUEUE_ON_SIGTERM)
    job_id, printed = interrupt(script, "scancel", "--signal=TERM", options=["--no-requeue"])
    assert "REFUSED" in printed and "exited with code 75" in printed
    assert f"found  scontrol requeue {job_id}: Requested operation is presently disabled" in printed
    assert f"type   sbatch {script}\n" in printed and "--name my-run" in printed
