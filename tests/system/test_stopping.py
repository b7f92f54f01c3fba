"""Runs that stop, fail or are killed at any moment end in the same state as an uninterrupted run."""

import json
import random
import signal
import socket
from pathlib import Path

import pytest
import torch

from rankzero.runs.checkpoints.manifest import checkpoints_in, newest_valid
from running import disk_at
from system.forks import Forks
from system.test_exactly_once import CLASSES, keep_what_was_saved, learned, noted, same, scalars, summary

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)

LONG = (
    "--model.pause",
    "0.005",
    "--model.dropout",
    "0.2",
    "--data.noise",
    "0.1",
    "--trainer.val_check_interval",
    "0.25",
)

pytestmark = pytest.mark.xdist_group("forks")


def same_as_the_whole(folder: Path, run: str) -> None:
    """Checks that a run of many attempts equals the uninterrupted run."""
    here, there = summary(folder, run), summary(folder, "whole")
    assert all(here[name] == there[name] for name in ("status", "metrics", "ledger", "steps", "epochs", "samples"))
    assert same(learned(folder / "runs" / run), learned(folder / "runs/whole"))
    assert scalars(folder / "runs" / run) == scalars(folder / "runs/whole")


def last_steps(folder: Path, world: int) -> set[int]:
    """Returns the set of the last steps that the ranks trained in their newest attempt."""
    return {max((step for _, step in noted_by(folder, rank)), default=-1) for rank in range(world)}


def noted_by(folder: Path, rank: int) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in (folder / f"noted-{rank}.jsonl").read_text().splitlines()]
    return [(epoch, step) for kind, epoch, step, _ in lines if kind == "train"]


@pytest.mark.parametrize(
    ("world", "stops", "settings"),
    [
        (1, 1, ("--data.workers", "2")),
        (2, 3, ()),
        pytest.param(2, 200, (), marks=pytest.mark.soak),
        pytest.param(2, 50, ("--data.workers", "1"), marks=pytest.mark.soak),
        pytest.param(3, 50, ("--trainer.strategy", "ddp_find_unused_parameters_true"), marks=pytest.mark.soak),
    ],
)
def test_a_signal_to_any_rank_stops_all_ranks_after_the_same_step(forks: Forks, mine, world, stops, settings):
    """Sends a random stop signal to random ranks, once or several times, in the first second of an attempt."""
    arguments = (*CLASSES, *LONG, "--data.count", "320", "--epochs", f"{3 * stops + 6}", *settings)
    arguments += ("--global_batch_size", "16", "--save_every", "100000")
    forks.fit(*arguments, "--run", "whole", folder=mine, world=world, seconds=1500)
    given, draw, stopped = noted(mine), random.Random(world), 0
    everything = {}
    for file in mine.glob("noted-*"):
        file.unlink()
    while True:
        chosen = [rank for rank in range(world) if draw.random() < 0.5] or [draw.randrange(world)]
        begins, signum = draw.uniform(0.0, 1.0), draw.choice(STOPPING[:2] if stopped % 2 else STOPPING)
        again = range(1 if signum == signal.SIGINT else draw.choice((1, 1, 3)))
        signals = [(begins + 0.05 * time, int(signum), rank) for rank in chosen for time in again]
        signals = signals if stopped < stops else []
        codes = forks.fit(*arguments, "--run", "x", folder=mine, world=world, code=None, signals=signals, seconds=1500)
        for step, ranks in noted(mine).items():
            assert step not in everything, "a step was taken twice"
            everything[step] = ranks
        if mine.joinpath("noted-0.jsonl").exists():
            assert len(last_steps(mine, world)) == 1
        for file in mine.glob("noted-*"):
            file.unlink()
        if codes == [0] * world:
            break
        assert codes == [75] * world, forks.said(mine, world)
        newest, refused = newest_valid(mine / "runs/x/checkpoints")
        assert newest and not refused and summary(mine, "x")["status"] == "stopped"
        assert summary(mine, "x")["steps"] == int(newest.name.removeprefix("step-"))
        stopped += 1
    assert stopped == stops, f"the run was done after {stopped} stops"
    assert everything == given
    same_as_the_whole(mine, "x")


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.soak)], ids=["sample", "campaign"])
def test_a_run_killed_on_any_rank_at_any_moment_equals_an_uninterrupted_run(forks: Forks, mine, kills):
    arguments = (*CLASSES, *LONG, "--data.count", "320", "--epochs", f"{3 * kills}", "--global_batch_size", "16")
    arguments += ("--start_timeout", "5")  # for a rank that is killed before the rendezvous
    forks.fit(*arguments, "--run", "whole", "--save_every", "5steps", folder=mine, world=2, seconds=1500)
    draw, killed, attempts = random.Random(0), 0, 0
    given, everything = noted(mine), {}
    for file in mine.glob("noted-*"):
        file.unlink()
    while True:
        signals = [(draw.uniform(0.0, 1.0), int(signal.SIGKILL), draw.randrange(2))] if killed < kills else []
        saves = ("--save_every", "5steps")
        codes = forks.fit(
            *arguments, *saves, "--run", "x", folder=mine, world=2, code=None, signals=signals, seconds=1500
        )
        attempts += 1
        keep_what_was_saved(mine, "x")
        everything.update(noted(mine))
        for file in mine.glob("noted-*"):
            file.unlink()
        if codes == [0, 0]:
            break
        assert -signal.SIGKILL in codes and set(codes) <= {-signal.SIGKILL, 1, 2}, forks.said(mine, 2)
        killed += 1
    assert killed == kills, f"the run was done after {killed} kills"
    assert everything == given
    same_as_the_whole(mine, "x")


FAULTS = """
import os, signal, sys, time
from lightning.pytorch import Callback

class Fault(Callback):
    def __init__(self, where: str, rank: int = 1):
        self.where, self.rank = where, rank

    def strike(self, where, trainer):
        if where == self.where.partition(" ")[0] and trainer.global_rank == self.rank and trainer.global_step > 5:
            kind = self.where.partition(" ")[2]
            if kind.startswith("_exit"):
                os._exit(int(kind.removeprefix("_exit")))
            if kind:
                os.kill(os.getpid(), getattr(signal, kind)) if kind.startswith("SIG") else sys.exit(3)
            raise KeyError("deliberate")

    def on_train_batch_end(self, trainer, *arguments): self.strike("batch", trainer)
    def on_validation_batch_end(self, trainer, *arguments): self.strike("validation", trainer)
    def on_train_epoch_end(self, trainer, *arguments): self.strike("epoch", trainer)
"""


@pytest.mark.parametrize(
    ("where", "rank", "says"),
    [
        ("batch", 1, "rank 1 on {host} failed with the error above"),
        ("validation", 0, "rank 0 on {host} failed with the error above"),
        ("epoch", 2, "rank 2 on {host} failed with the error above"),
        ("batch exit", 1, "rank 1 on {host} failed with the error above"),
        ("batch SIGKILL", 1, "rank 1 on {host} is gone"),
        ("batch SIGKILL", 0, "rank 0 on {host} is gone"),
        ("batch SIGSTOP", 2, "rank 2 on {host} was stopped (SIGSTOP)"),
        ("batch _exit3", 1, "rank 1 on {host} ended with exit code 3 (os._exit) without a report; ending all"),
        ("batch _exit0", 0, "rank 0 on {host} ended with exit code 0 (os._exit) without a report; ending all"),
        ("epoch _exit75", 2, "rank 2 on {host} ended with exit code 75 (os._exit) without a report; ending all"),
        ("batch SIGSEGV", 1, "rank 1 on {host} was ended by SIGSEGV, see runs/x/logs/rank-001.log; ending all"),
        ("batch SIGABRT", 0, "rank 0 on {host} was ended by SIGABRT, see runs/x/logs/rank-000.log; ending all"),
    ],
)
def test_a_failure_of_one_rank_ends_all_ranks_and_is_reported_once(forks: Forks, mine, where, rank, says):
    """The cause is printed once, with rank and host; every rank that still can writes its traceback to its log."""
    (mine / "faults.py").write_text(FAULTS)
    arguments = ("--trainer.callbacks", "faults.Fault", "--trainer.callbacks.where", where, "--trainer.callbacks.rank")
    codes = forks.fit(*CLASSES, *arguments, f"{rank}", "--epochs", "9", "--run", "x", folder=mine, world=3, code=None)
    name = where.partition(" ")[2]
    lost = name.startswith("SIG")
    ended = -signal.SIGKILL if name == "SIGSTOP" else -getattr(signal, name) if lost else 1
    assert codes == [ended if one == rank else 1 for one in range(3)]
    said = "\n".join(forks.said(mine, 3))
    assert said.count(says.format(host=socket.gethostname())) == 1
    assert said.count(" failed with the error above") + said.count("; ending all") == 1
    assert said.count("Traceback") <= 2
    for one in {0, 1, 2} - ({rank} if name in ("SIGKILL", "SIGSTOP") else set()):
        log = (mine / f"runs/x/logs/rank-{one:03d}.log").read_text()
        assert 'File "' in log and (one != rank or "deliberate" in log or "exit" in where or lost)
    if codes[0] == 1:
        assert summary(mine, "x")["status"] == "failed"


def test_a_failing_rank_does_not_wait_in_on_exception_checkpoint(forks: Forks, mine):
    """Lightning's OnExceptionCheckpoint saves with a barrier, which the other ranks never reach."""
    (mine / "faults.py").write_text(FAULTS)
    (mine / "config.yaml").write_text(
        "trainer:\n  callbacks:\n"
        "  - class_path: lightning.pytorch.callbacks.OnExceptionCheckpoint\n    init_args: {dirpath: here}\n"
        "  - class_path: faults.Fault\n    init_args: {where: batch}\n"
    )
    forks.fit(*CLASSES, "--config", "config.yaml", "--epochs", "9", folder=mine, world=2, code=1)
    said = "\n".join(forks.said(mine, 2))
    assert said.count("KeyError: 'deliberate'") == 1 and said.count(" failed with the error above") == 1


def test_flags_override_the_settings_in_the_checkpoint(forks: Forks, mine):
    arguments = (*CLASSES, "--data.count", "64", "--run", "x")
    forks.fit(*arguments, "--epochs", "1", "--model.rate", "0.25", folder=mine)
    forks.fit(*arguments, "--epochs", "2", "--model.rate", "0.125", folder=mine)
    newest = newest_valid(mine / "runs/x/checkpoints")[0]
    state = torch.load(newest / "state.pt", weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] in (0.125, 0.0625)
    said = forks.said(mine)[0]
    assert "changed since the checkpoint: " in said and "--model.rate 0.25 -> 0.125" in said
    assert "--trainer.max_epochs 1 -> 2" in said


COUNTS = """
from collections import Counter
import json
import torch
from torch.profiler import ProfilerActivity, profile
from lightning.pytorch import Callback, LightningModule

FROM, TO = 71, 91  # in the second epoch of 64 steps, with no multiple of the logging interval of 100

def collectives(events):
    # And how often a number is read, for which a device is waited for.
    return dict(Counter(one.name for one in events if one.name.startswith("c10d::") or one.name == "aten::item"))

class Count(Callback):
    def on_fit_start(self, trainer, module):
        self.bare = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1))
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.01)
        def steps(count):
            for _ in range(count):
                optimizer.zero_grad()
                self.bare(torch.rand(16, 20)).mean().backward()
                optimizer.step()
        steps(FROM)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            steps(TO - FROM)
        self.found = {"bare": collectives(profiler.events())}

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == FROM:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()
        elif trainer.global_step == TO:
            self.profiler.__exit__(None, None, None)
            self.found["ours"] = collectives(self.profiler.events())
            with open(f"collectives-{trainer.global_rank}.json", "w") as file:
                json.dump(self.found, file)

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("both", loss * 0 + self.global_rank, sync_dist=True, on_epoch=True)
        self.log("sum", loss * 0 + 1 + self.global_rank, sync_dist=True, reduce_fx="sum")
        if self.global_rank == 0:
            self.log("alone", loss * 0 + 7, sync_dist=True, rank_zero_only=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def test_a_step_needs_no_more_collectives_than_bare_ddp(forks: Forks, mine):
    """Counts the collectives of 20 steps, with sample ledger, stop agreement, metrics and a time limit."""
    (mine / "counts.py").write_text(COUNTS)
    arguments = ("--model", "MLP", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", "100", "--time_limit", "2h")
    forks.fit(*arguments, folder=mine, world=2)
    for rank in (0, 1):
        found = json.loads((mine / f"collectives-{rank}.json").read_text())
        assert found["ours"] == found["bare"] == {"c10d::allreduce_": 20}


@pytest.mark.parametrize(("every", "more"), [(100, 0), (10, 2)])
def test_averages_over_ranks_are_computed_only_in_logging_steps(every, more, forks: Forks, mine):
    """Counts the collectives of 20 steps, with no or two logging steps, after an epoch in which no metric was read."""
    (mine / "counts.py").write_text(COUNTS)
    arguments = ("--model", "counts.Net", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", str(every), "--run", f"every-{every}")
    forks.fit(*arguments, folder=mine, world=2)
    for rank in (0, 1):
        counted = json.loads((mine / f"collectives-{rank}.json").read_text())["ours"]
        assert counted.pop("c10d::allreduce_") == 20 + more
        assert bool(counted) == bool(more)  # between logging steps, no other collective and no read of a number
    metrics = json.loads((mine / f"runs/every-{every}/summary.json").read_text())["metrics"]
    assert (metrics["rank"], metrics["both_epoch"], metrics["both"], metrics["sum"]) == (0.5, 0.5, 0.5, 3.0)
    assert metrics["alone"] == 7


def test_a_run_stops_before_its_time_limit_and_starts_no_step_that_does_not_fit(forks: Forks, mine):
    """The margin is 10 s, and 5 s are assumed for a save that has not been measured."""
    arguments = (*CLASSES, *LONG, "--data.count", "320", "--global_batch_size", "16", "--run", "x")
    forks.fit(*arguments, "--epochs", "100000", "--time_limit", "24s", folder=mine, world=2, code=75)
    stopped = summary(mine, "x")
    assert stopped["status"] == "stopped" and stopped["steps"] > 0 and stopped["seconds"] < 24
    forks.fit(*arguments, "--epochs", "100000", "--time_limit", "5s", folder=mine, world=2, code=75)
    said = forks.said(mine)[0]
    assert said.count("the end of the time that there is: stopping") == 1
    assert "not a single step fits into the time that there is" in said
    assert summary(mine, "x")["steps"] == stopped["steps"]


def test_keep_best_keeps_the_best_checkpoint_beside_the_newest(forks: Forks, mine):
    arguments = (*CLASSES, "--data.count", "64", "--epochs", "6", "--run", "x", "--keep", "1")
    forks.fit(*arguments, "--keep_best", "max:val_loss", folder=mine)
    kept = checkpoints_in(mine / "runs/x/checkpoints")
    assert [path.name for path in kept] == ["step-00000004", "step-00000024"]  # val_loss only falls
    assert summary(mine, "x")["best"] == "checkpoints/step-00000004"


@pytest.fixture
def small_disk(mine):
    with disk_at(mine / "runs", "512k") as disk:
        yield disk


FILL = """
from lightning.pytorch import Callback

class Fill(Callback):
    def __init__(self, empties: int):
        self.empties = empties

    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == 0 and trainer.current_epoch == 2:
            with open("runs/filling", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1024))
                except OSError:
                    pass
        if trainer.global_rank == 0 and trainer.current_epoch == self.empties:
            import os
            os.remove("runs/filling")
"""


@pytest.mark.parametrize(
    ("empties", "how", "code"),
    [(4, "warn", 0), pytest.param(9, "warn", 1, marks=pytest.mark.soak), (9, "stop", 1)],
    ids=["room again", "full", "stops"],
)
def test_a_full_disk_keeps_the_newest_checkpoint_to_resume_from(forks: Forks, mine, small_disk, empties, how, code):
    (mine / "fill.py").write_text(FILL)
    filling = ("--trainer.callbacks", "fill.Fill", "--trainer.callbacks.empties", f"{empties}", "--save_errors", how)
    arguments = (*CLASSES, "--data.count", "64", "--epochs", "6", "--run", "x")
    forks.fit(*arguments, *filling, folder=mine, world=2, code=code)
    said = forks.said(mine)[0]
    assert "could not be saved: [Errno 28] No space left on device" in said and "Traceback" not in said
    assert "the newest checkpoint is runs/x/checkpoints/step-0000000" in said
    newest, refused = newest_valid(small_disk / "x/checkpoints")
    assert newest and not refused
    assert {path.name for path in newest.parent.iterdir()} == {path.name for path in checkpoints_in(newest.parent)}
    if code == 0:
        assert newest.name == "step-00000012" and summary(mine, "x")["status"] == "finished"
        return
    (small_disk / "filling").unlink()
    forks.fit(*arguments, folder=mine, world=2)
    forks.fit(*arguments, "--run", "whole", folder=mine, world=2)
    assert same(learned(small_disk / "x"), learned(small_disk / "whole"))
