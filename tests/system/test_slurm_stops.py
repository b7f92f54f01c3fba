"""A run on a real Slurm stops at a safe point, is requeued, and learns the same weights as an undisturbed run.

Slurm's shortest time limit is one minute, checked every 30 s. Tests that depend on a limit are marked soak.
"""

import contextlib
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from running import BIN, run, script, wait_until, weights
from system.forks import summary
from system.slurm import kill_node, kill_slurmd, restart_slurmd, run_slurm_command, start, state, wait_for
from system.test_exactly_once import CLASSES

pytestmark = pytest.mark.xdist_group("slurm")

STEPS_AN_EPOCH = 32
FIT = script("fit")
TRAIN = (*CLASSES, "--model.dropout", "0.1", "--data.count", "512", "--global_batch_size", "16", "--run", "stops")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """Returns a function that trains two tasks without a stop for some epochs, and returns their weights."""

    @cache
    def learn(epochs):
        folder = tmp_path_factory.mktemp("undisturbed")
        shutil.copy(Path(__file__).parent / "recording.py", folder)
        run("srun", *TWO_NODES, "python", FIT, *TRAIN, "--epochs", str(epochs), folder=folder, environment=slurm)
        return weights(folder / "runs/stops")

    return learn


class SlowJob:
    """A job that trains slowly and that a test stops."""

    def __init__(self, folder, slurm, undisturbed):
        self.folder, self.slurm, self.undisturbed = folder, slurm, undisturbed

    def start(self, *options, epochs=3, flags=(), until=20):
        """Submits the job and waits for a step; a step takes 0.05 s, an epoch 1.6 s."""
        self.epochs = epochs
        arguments = (*TRAIN, "--epochs", str(epochs), "--model.pause", "0.05", *flags)
        self.file = self.folder / "job.sh"
        self.file.write_text(f"#!/bin/sh\nsrun {BIN}/python {FIT} {' '.join(arguments)}\necho exited with code $?\n")
        self.job = start(self.file, self.slurm, *TWO_NODES, *options)
        wait_until(lambda: until in self.steps, f"step {until}")

    def run_slurm_command(self, *command):
        run_slurm_command(*command, self.job, environment=self.slurm)

    def wait_for_end(self, seconds=120):
        """Waits for the end of the last attempt; returns the output of all attempts."""
        return wait_for(self.job, self.folder, self.slurm, seconds)

    @property
    def steps(self):
        """The steps that all attempts have taken, in order."""
        with contextlib.suppress(FileNotFoundError):
            lines = map(json.loads, (self.folder / "noted-0.jsonl").read_text().split("\n")[:-1])
            return [step for kind, _, step, _ in lines if kind == "train"]
        return []

    @property
    def has_attempt_ended(self):
        """Whether the job no longer runs: it waits for the next attempt, or has ended."""
        return state(self.job, self.slurm) != "RUNNING"

    @property
    def summary(self):
        return summary(self.folder, "stops")

    def check_finished(self, attempts=(2,), repeats=False, seconds=120):
        """Waits for the end, checks that the weights equal the undisturbed run's bit for bit, and returns the output.

        Unless `repeats`, every step must have been taken once.
        """
        printed = self.wait_for_end(seconds)
        assert self.summary["status"] == "finished" and self.summary["attempts"] in attempts, printed
        found, expected = weights(self.folder / "runs/stops"), self.undisturbed(self.epochs)
        assert all(torch.equal(found[name], expected[name]) for name in expected), printed
        total = range(self.epochs * STEPS_AN_EPOCH)
        assert repeats or self.steps == list(total), printed
        assert sorted(set(self.steps)) == list(total)
        return printed


@pytest.fixture
def slow_job(slurm, user_folder, undisturbed):
    return SlowJob(user_folder, slurm, undisturbed)


SIGTERM, *OTHERS = [("scancel", f"--signal={name}") for name in ("TERM", "USR1", "USR2", "INT")]
OTHERS = [pytest.param(command, marks=pytest.mark.soak) for command in (*OTHERS, ("scontrol", "requeue"))]


@pytest.mark.parametrize("command", [SIGTERM, *OTHERS], ids=" ".join)
def test_a_run_resumes_after_a_signal_to_all_tasks_or_a_requeue(slow_job, command):
    slow_job.start()
    slow_job.run_slurm_command(*command)
    slow_job.check_finished()


@pytest.mark.soak
@pytest.mark.parametrize(("warning", "epochs", "attempts"), [(["--signal=USR1@20"], 50, 3), ([], 40, 2)])
def test_a_run_with_or_without_a_warning_signal_stops_before_the_time_limit(slow_job, warning, epochs, attempts):
    slow_job.start("--time=1", *warning, epochs=epochs)
    printed = slow_job.check_finished(attempts=range(attempts, 20), seconds=900)
    assert warning or "DUE TO TIME LIMIT" not in printed


@pytest.mark.soak
@pytest.mark.parametrize("partition", ["main", "patient"])
def test_a_run_resumes_after_preemption_by_an_urgent_job(slow_job, slurm, partition):
    slow_job.start("--cpus-per-task=8", f"--partition={partition}")
    urgent = slow_job.folder / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 2\n")
    start(urgent, slurm, *TWO_NODES, "--cpus-per-task=8", "--partition=urgent")
    slow_job.check_finished()


@pytest.mark.soak
def test_a_canceled_job_is_not_requeued(slow_job):
    slow_job.start()
    slow_job.run_slurm_command("scancel")
    slow_job.wait_for_end()
    assert slow_job.summary["status"] == "stopped" and slow_job.summary["attempts"] == 1


@pytest.mark.soak
@pytest.mark.parametrize(("kill", "node"), [(kill_slurmd, "n2"), (kill_node, "n1"), (kill_node, "n2")])
def test_a_run_resumes_after_a_node_loses_power_or_its_contact_to_slurm(slow_job, slurm, kill, node):
    """The job script and rank zero run on n1. Without slurmd, tasks run until Slurm marks their node as down."""
    slow_job.start(epochs=30, flags=("--save_every", "20steps"), until=70)
    kill(node, slurm)
    wait_until(lambda: slow_job.has_attempt_ended, "the end of the first attempt")
    restart_slurmd(node, slurm)
    slow_job.check_finished(repeats=kill is kill_node)


@pytest.mark.soak
@pytest.mark.parametrize(("options", "flags"), [(("--no-requeue",), ()), ((), ("--requeue", "never"))])
def test_a_stopped_run_that_is_not_requeued_is_resumed_by_the_next_job(slow_job, options, flags):
    slow_job.start(*options, flags=flags)
    slow_job.run_slurm_command(*SIGTERM)
    printed = slow_job.wait_for_end()
    assert slow_job.summary["status"] == "stopped" and "exited with code 75" in printed, printed
    assert 0 < len(slow_job.steps) < slow_job.epochs * STEPS_AN_EPOCH
    if options:
        assert f"found  scontrol requeue {slow_job.job}: Requested operation is presently disabled" in printed
        assert f"type   sbatch {slow_job.file}\n" in printed and "--name stops" in printed
    slow_job.start()
    slow_job.check_finished()


MEMBER = """\
import os, time
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.scheduler.requeue import requeue
index, attempt = os.environ["SLURM_ARRAY_TASK_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
print("member", index, "attempt", attempt, flush=True)
if attempt == "0" and index == "2": requeue(detect())  # the last member has the job id of the array
time.sleep(3)
"""


@pytest.mark.soak
def test_a_member_of_a_job_array_requeues_only_itself(slurm, tmp_path):
    (tmp_path / "task.py").write_text(MEMBER)
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\nsrun --ntasks=1 {BIN}/python -u {tmp_path}/task.py\n")
    array = start(tmp_path / "job.sh", slurm, "--array=1-2", f"--output={tmp_path}/%A.out")
    lines = [line for line in wait_for(array, tmp_path, slurm).splitlines() if line.startswith("member")]
    assert sorted(lines) == ["member 1 attempt 0", "member 2 attempt 0", "member 2 attempt 1"]
