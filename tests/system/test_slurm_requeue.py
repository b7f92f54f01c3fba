"""Queries and requests of a task to a real Slurm: the end of the job, and the requeue."""

import pytest

from running import BIN, run, wait_until
from system.slurm import run_slurm_command, start, wait_for

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
        return f"srun --ntasks=1 {BIN}/python -u {tmp_path}/task.py"

    return write


@pytest.fixture
def job(tmp_path, task, slurm):
    """Returns a function that writes a job script, and returns its file."""

    def write(text):
        script = tmp_path / "job.sh"
        script.write_text(f"#!/bin/sh\n{task(text)}\n")
        return script

    return write


@pytest.mark.parametrize(("limit", "minimum", "maximum"), [("5", 240, 301), ("1-00:00:00", 86000, 86401)])
def test_the_end_of_a_job_follows_from_its_time_limit(slurm, tmp_path, task, limit, minimum, maximum):
    command = task("print(end_of_allocation(launch) - time.time())")
    result = run(*command.split(), folder=tmp_path, environment={**slurm, "SLURM_TIMELIMIT": limit})
    assert minimum < float(result.out) < maximum


def test_a_job_without_a_limit_has_no_end_and_an_interactive_job_is_not_requeued(slurm, tmp_path, task):
    command = task("print(end_of_allocation(launch), requeue(launch).requeue.name)")
    assert run(*command.split(), folder=tmp_path, environment=slurm).out.split() == ["None", "NO_JOB"]


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


STOPS_ON_SIGTERM = """\
if attempt == "1": sys.exit(print("once more"))
def stop(*_):
    outcome = requeue(launch, "my-run")
    print(outcome.requeue.name, outcome.message, flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "message", "attempts"),
    [
        (("scancel",), "ENDING job {} is COMPLETING", 1),
        (("scontrol", "requeue"), "ENDING Slurm has already requeued job {}", 2),
    ],
)
def test_a_canceled_or_requeued_job_is_not_requeued_again(slurm, tmp_path, job, command, message, attempts):
    job_id = start(job(STOPS_ON_SIGTERM), slurm)
    output = tmp_path / f"{job_id}.out"
    wait_until(lambda: output.exists() and "ready" in output.read_text(), f"job {job_id}")
    run_slurm_command(*command, job_id, environment=slurm)
    printed = wait_for(job_id, tmp_path, slurm)
    assert message.format(job_id) in printed
    lines = printed.splitlines()
    assert (lines.count("ready"), lines.count("once more")) == (1, attempts - 1)
