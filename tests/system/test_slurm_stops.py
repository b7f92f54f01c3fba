"""A run on a real Slurm stops at a safe point, is requeued, and learns the same weights as an undisturbed run.

Slurm's shortest time limit is one minute, checked every 30 s. Tests that depend on a limit are marked soak.
"""

import contextlib
import json

import pytest
import torch

from running import BIN, run, script, weights
from system.slurm import bring_back, kill_slurmd, lose, order, start, state, wait_for, wait_until

pytestmark = pytest.mark.xdist_group("slurm")

SLOW = """\
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F


class Slow(LightningModule):
    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds = seconds
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        if self.global_rank == 0:
            with Path("steps").open("a") as file:
                file.write(f"{self.global_step}\\n")
        inputs, targets = batch
        return F.mse_loss(self.layer(F.dropout(inputs, 0.1)), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val/loss", F.mse_loss(self.layer(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
"""
STEPS_AN_EPOCH = 32
FIT = script("fit")
TRAIN = ("--model", "slow.Slow", "--data", "Toy", "--global_batch_size", "64", "--run", "stops")
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """Returns a function that trains two tasks without a stop for some epochs, and returns their weights."""
    known = {}

    def learn(epochs):
        if epochs not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            (folder / "slow.py").write_text(SLOW)
            command = ("python", FIT, *TRAIN, "--epochs", str(epochs))
            run("srun", *TWO_NODES, *command, folder=folder, environment=slurm)
            known[epochs] = weights(folder / "runs/stops")
        return known[epochs]

    return learn


class Stopping:
    """A job that trains slowly and that a test stops."""

    def __init__(self, folder, slurm, undisturbed):
        self.folder, self.slurm, self.undisturbed = folder, slurm, undisturbed
        (folder / "slow.py").write_text(SLOW)

    def start(self, *options, epochs=3, flags=()):
        """Submits the job; a step takes 0.05 s, an epoch 1.6 s."""
        self.epochs = epochs
        arguments = (*TRAIN, "--epochs", str(epochs), "--model.seconds", "0.05", *flags)
        self.file = self.folder / "job.sh"
        self.file.write_text(f"#!/bin/sh\nsrun {BIN}/python {FIT} {' '.join(arguments)}\necho left with $?\n")
        self.job = start(self.file, self.slurm, *TWO_NODES, *options)

    def wait_for_step(self, step):
        wait_until(lambda: step in self.steps, f"step {step}")

    def order(self, *command):
        order(*command, self.job, environment=self.slurm)

    def ends(self, seconds=120):
        """Waits for the end of the last attempt; returns the output of all attempts."""
        return wait_for(self.job, self.folder, self.slurm, seconds)

    @property
    def steps(self):
        """The steps that all attempts have taken, in order."""
        with contextlib.suppress(FileNotFoundError):
            return [int(line) for line in (self.folder / "steps").read_text().split("\n")[:-1]]
        return []

    @property
    def attempt_ended(self):
        """Whether the job no longer runs: it waits for the next attempt, or has ended."""
        return state(self.job, self.slurm) != "RUNNING"

    @property
    def summary(self):
        return json.loads((self.folder / "runs/stops/summary.json").read_text())

    def check_finished(self, printed, attempts, repeats=False):
        """Checks that weights equal the undisturbed run's bit for bit; unless `repeats`, every step was taken once."""
        summary = self.summary
        assert summary["status"] == "finished" and summary["attempts"] in attempts, printed
        there, expected = weights(self.folder / "runs/stops"), self.undisturbed(self.epochs)
        assert all(torch.equal(there[name], expected[name]) for name in expected), printed
        total = range(self.epochs * STEPS_AN_EPOCH)
        assert repeats or self.steps == list(total), printed
        assert sorted(set(self.steps)) == list(total)

    def check_stopped(self, printed):
        """Checks that the run stopped before its end, and exited with code 75."""
        assert self.summary["status"] == "stopped" and "left with 75" in printed, printed
        assert 0 < len(self.steps) < self.epochs * STEPS_AN_EPOCH


@pytest.fixture
def stopping(slurm, tmp_path, undisturbed):
    return Stopping(tmp_path, slurm, undisturbed)


def test_a_run_resumes_after_sigterm_to_all_tasks(stopping):
    stopping.start()
    stopping.wait_for_step(20)
    stopping.order("scancel", "--signal=TERM")
    stopping.check_finished(stopping.ends(), attempts=(2,))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["USR1", "USR2", "INT"])
def test_a_run_resumes_after_other_signals_to_all_tasks(stopping, name):
    stopping.start()
    stopping.wait_for_step(20)
    stopping.order("scancel", f"--signal={name}")
    stopping.check_finished(stopping.ends(), attempts=(2,))


@pytest.mark.soak
def test_a_run_with_a_warning_signal_before_the_time_limit_finishes_in_several_attempts(stopping):
    stopping.start("--time=1", "--signal=USR1@20", epochs=50)
    stopping.check_finished(stopping.ends(seconds=900), attempts=range(3, 20))


@pytest.mark.soak
def test_a_run_without_a_warning_signal_stops_before_the_time_limit(stopping):
    stopping.start("--time=1", epochs=40)
    printed = stopping.ends(seconds=600)
    stopping.check_finished(printed, attempts=range(2, 20))
    assert "DUE TO TIME LIMIT" not in printed


@pytest.mark.soak
def test_a_run_resumes_after_scontrol_requeue(stopping):
    stopping.start()
    stopping.wait_for_step(20)
    stopping.order("scontrol", "requeue")
    stopping.check_finished(stopping.ends(), attempts=(2,))


@pytest.mark.soak
@pytest.mark.parametrize("partition", ["main", "patient"])
def test_a_run_resumes_after_preemption_by_an_urgent_job(stopping, slurm, partition):
    stopping.start("--cpus-per-task=8", f"--partition={partition}")
    stopping.wait_for_step(20)
    urgent = stopping.folder / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 2\n")
    start(urgent, slurm, *TWO_NODES, "--cpus-per-task=8", "--partition=urgent")
    printed = stopping.ends()
    stopping.check_finished(printed, attempts=(2,))


@pytest.mark.soak
def test_a_canceled_job_is_not_requeued(stopping):
    stopping.start()
    stopping.wait_for_step(20)
    stopping.order("scancel")
    stopping.ends()
    assert stopping.summary["status"] == "stopped" and stopping.summary["attempts"] == 1


@pytest.mark.soak
def test_a_run_resumes_after_slurm_loses_contact_with_a_node(stopping, slurm):
    """The node's tasks continue until Slurm marks it as down after half a minute, and kills those on the other node."""
    stopping.start(epochs=30)
    stopping.wait_for_step(20)
    kill_slurmd("n2", slurm)
    wait_until(lambda: stopping.attempt_ended, "the end of the first attempt", seconds=90)
    bring_back("n2", slurm)
    stopping.check_finished(stopping.ends(), attempts=(2,))


@pytest.mark.soak
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_run_resumes_after_a_node_loses_power(stopping, slurm, node):
    """The job script and rank zero run on node n1."""
    stopping.start(epochs=8, flags=("--save_every", "20steps"))
    stopping.wait_for_step(70)
    lose(node, slurm)
    wait_until(lambda: stopping.attempt_ended, "the end of the first attempt", seconds=90)
    bring_back(node, slurm)
    stopping.check_finished(stopping.ends(), attempts=(2,), repeats=True)


@pytest.mark.soak
def test_a_run_that_slurm_may_not_requeue_prints_the_command_to_type(stopping):
    stopping.start("--no-requeue")
    stopping.wait_for_step(20)
    stopping.order("scancel", "--signal=TERM")
    printed = stopping.ends()
    stopping.check_stopped(printed)
    assert f"type   sbatch {stopping.file}" in printed and "--name stops" in printed
    stopping.start()
    stopping.check_finished(stopping.ends(), attempts=(2,))


@pytest.mark.soak
def test_a_run_with_requeue_never_is_not_requeued(stopping):
    stopping.start(flags=("--requeue", "never"))
    stopping.wait_for_step(20)
    stopping.order("scancel", "--signal=TERM")
    stopping.check_stopped(stopping.ends())
    stopping.start()
    stopping.check_finished(stopping.ends(), attempts=(2,))
