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
from system.test_exactly_once import (
    CLASSES,
    are_equal,
    drop_unsaved_records,
    learned_state,
    recorded_samples,
    scalars,
    summary,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)

SLOW_RUN = (
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


def check_equals_uninterrupted(folder: Path, run: str) -> None:
    """Checks that a run of many attempts equals the uninterrupted run."""
    found, expected = summary(folder, run), summary(folder, "whole")
    assert all(found[name] == expected[name] for name in ("status", "metrics", "ledger", "steps", "epochs", "samples"))
    assert are_equal(learned_state(folder / "runs" / run), learned_state(folder / "runs/whole"))
    assert scalars(folder / "runs" / run) == scalars(folder / "runs/whole")


def last_steps(folder: Path, world: int) -> set[int]:
    """Returns the set of the last steps that the ranks trained in their newest attempt."""
    return {max((step for _, step in recorded_steps(folder, rank)), default=-1) for rank in range(world)}


def recorded_steps(folder: Path, rank: int) -> list[tuple[int, int]]:
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
def test_a_signal_to_any_rank_stops_all_ranks_after_the_same_step(forks: Forks, user_folder, world, stops, settings):
    """Sends a random stop signal to random ranks, once or several times, in the first second of an attempt."""
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--epochs", f"{3 * stops + 6}", *settings)
    arguments += ("--global_batch_size", "16", "--save_every", "100000")
    forks.fit(*arguments, "--run", "whole", folder=user_folder, world=world, seconds=1500)
    expected, generator, stopped = recorded_samples(user_folder), random.Random(world), 0
    found = {}
    for file in user_folder.glob("noted-*"):
        file.unlink()
    while True:
        ranks_to_signal = [rank for rank in range(world) if generator.random() < 0.5] or [generator.randrange(world)]
        delay, signum = generator.uniform(0.0, 1.0), generator.choice(STOP_SIGNALS[:2] if stopped % 2 else STOP_SIGNALS)
        repetitions = range(1 if signum == signal.SIGINT else generator.choice((1, 1, 3)))
        signals = [(delay + 0.05 * number, int(signum), rank) for rank in ranks_to_signal for number in repetitions]
        signals = signals if stopped < stops else []
        codes = forks.fit(
            *arguments, "--run", "x", folder=user_folder, world=world, code=None, signals=signals, seconds=1500
        )
        for step, ranks in recorded_samples(user_folder).items():
            assert step not in found, "a step was taken twice"
            found[step] = ranks
        if user_folder.joinpath("noted-0.jsonl").exists():
            assert len(last_steps(user_folder, world)) == 1
        for file in user_folder.glob("noted-*"):
            file.unlink()
        if codes == [0] * world:
            break
        assert codes == [75] * world, forks.outputs(user_folder, world)
        newest, refused = newest_valid(user_folder / "runs/x/checkpoints")
        assert newest and not refused and summary(user_folder, "x")["status"] == "stopped"
        assert summary(user_folder, "x")["steps"] == int(newest.name.removeprefix("step-"))
        stopped += 1
    assert stopped == stops, f"the run was done after {stopped} stops"
    assert found == expected
    check_equals_uninterrupted(user_folder, "x")


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.soak)], ids=["sample", "campaign"])
def test_a_run_killed_on_any_rank_at_any_moment_equals_an_uninterrupted_run(forks: Forks, user_folder, kills):
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--epochs", f"{3 * kills}", "--global_batch_size", "16")
    arguments += ("--start_timeout", "5")  # for a rank that is killed before the rendezvous
    forks.fit(*arguments, "--run", "whole", "--save_every", "5steps", folder=user_folder, world=2, seconds=1500)
    generator, killed, attempts = random.Random(0), 0, 0
    expected, found = recorded_samples(user_folder), {}
    for file in user_folder.glob("noted-*"):
        file.unlink()
    while True:
        signals = [(generator.uniform(0.0, 1.0), int(signal.SIGKILL), generator.randrange(2))] if killed < kills else []
        saves = ("--save_every", "5steps")
        codes = forks.fit(
            *arguments, *saves, "--run", "x", folder=user_folder, world=2, code=None, signals=signals, seconds=1500
        )
        attempts += 1
        drop_unsaved_records(user_folder, "x")
        found.update(recorded_samples(user_folder))
        for file in user_folder.glob("noted-*"):
            file.unlink()
        if codes == [0, 0]:
            break
        assert -signal.SIGKILL in codes and set(codes) <= {-signal.SIGKILL, 1, 2}, forks.outputs(user_folder, 2)
        killed += 1
    assert killed == kills, f"the run was done after {killed} kills"
    assert found == expected
    check_equals_uninterrupted(user_folder, "x")


FAULT_CALLBACK = """
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
    ("fault", "rank", "message"),
    [
        ("batch", 1, "rank 1 on {host} failed with the error above"),
        ("validation", 0, "rank 0 on {host} failed with the error above"),
        ("epoch", 2, "rank 2 on {host} failed with the error above"),
        ("batch exit", 1, "rank 1 on {host} failed with the error above"),
        ("batch SIGKILL", 1, "rank 1 on {host} was lost"),
        ("batch SIGKILL", 0, "rank 0 on {host} was lost"),
        ("batch SIGSTOP", 2, "rank 2 on {host} was suspended (SIGSTOP)"),
        (
            "batch _exit3",
            1,
            "rank 1 on {host} exited with code 3 (os._exit) without an error report; stopping all ranks",
        ),
        (
            "batch _exit0",
            0,
            "rank 0 on {host} exited with code 0 (os._exit) without an error report; stopping all ranks",
        ),
        (
            "epoch _exit75",
            2,
            "rank 2 on {host} exited with code 75 (os._exit) without an error report; stopping all ranks",
        ),
        (
            "batch SIGSEGV",
            1,
            "rank 1 on {host} was killed by SIGSEGV, see runs/x/logs/rank-001.log; stopping all ranks",
        ),
        (
            "batch SIGABRT",
            0,
            "rank 0 on {host} was killed by SIGABRT, see runs/x/logs/rank-000.log; stopping all ranks",
        ),
    ],
)
def test_a_failure_of_one_rank_ends_all_ranks_and_is_reported_once(forks: Forks, user_folder, fault, rank, message):
    """The cause is printed once, with rank and host; every rank that still can writes its traceback to its log."""
    (user_folder / "faults.py").write_text(FAULT_CALLBACK)
    arguments = ("--trainer.callbacks", "faults.Fault", "--trainer.callbacks.where", fault, "--trainer.callbacks.rank")
    codes = forks.fit(
        *CLASSES, *arguments, f"{rank}", "--epochs", "9", "--run", "x", folder=user_folder, world=3, code=None
    )
    name = fault.partition(" ")[2]
    lost = name.startswith("SIG")
    ended = -signal.SIGKILL if name == "SIGSTOP" else -getattr(signal, name) if lost else 1
    assert codes == [ended if index == rank else 1 for index in range(3)]
    printed = "\n".join(forks.outputs(user_folder, 3))
    assert printed.count(message.format(host=socket.gethostname())) == 1
    assert printed.count(" failed with the error above") + printed.count("; stopping all ranks") == 1
    assert printed.count("Traceback") <= 2
    for index in {0, 1, 2} - ({rank} if name in ("SIGKILL", "SIGSTOP") else set()):
        log = (user_folder / f"runs/x/logs/rank-{index:03d}.log").read_text()
        assert 'File "' in log and (index != rank or "deliberate" in log or "exit" in fault or lost)
    if codes[0] == 1:
        assert summary(user_folder, "x")["status"] == "failed"


def test_a_failing_rank_does_not_wait_in_on_exception_checkpoint(forks: Forks, user_folder):
    """Lightning's OnExceptionCheckpoint saves with a barrier, which the other ranks never reach."""
    (user_folder / "faults.py").write_text(FAULT_CALLBACK)
    (user_folder / "config.yaml").write_text(
        "trainer:\n  callbacks:\n"
        "  - class_path: lightning.pytorch.callbacks.OnExceptionCheckpoint\n    init_args: {dirpath: here}\n"
        "  - class_path: faults.Fault\n    init_args: {where: batch}\n"
    )
    forks.fit(*CLASSES, "--config", "config.yaml", "--epochs", "9", folder=user_folder, world=2, code=1)
    printed = "\n".join(forks.outputs(user_folder, 2))
    assert printed.count("KeyError: 'deliberate'") == 1 and printed.count(" failed with the error above") == 1


def test_flags_override_the_settings_in_the_checkpoint(forks: Forks, user_folder):
    arguments = (*CLASSES, "--data.count", "64", "--run", "x")
    forks.fit(*arguments, "--epochs", "1", "--model.rate", "0.25", folder=user_folder)
    forks.fit(*arguments, "--epochs", "2", "--model.rate", "0.125", folder=user_folder)
    newest = newest_valid(user_folder / "runs/x/checkpoints")[0]
    state = torch.load(newest / "state.pt", weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] in (0.125, 0.0625)
    printed = forks.outputs(user_folder)[0]
    assert "changed since the checkpoint: " in printed and "--model.rate 0.25 -> 0.125" in printed
    assert "--trainer.max_epochs 1 -> 2" in printed


COUNT_CALLBACK = """
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


def test_a_step_needs_no_more_collectives_than_bare_ddp(forks: Forks, user_folder):
    """Counts the collectives of 20 steps, with sample ledger, stop agreement, metrics and a time limit."""
    (user_folder / "counts.py").write_text(COUNT_CALLBACK)
    arguments = ("--model", "MLP", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", "100", "--time_limit", "2h")
    forks.fit(*arguments, folder=user_folder, world=2)
    for rank in (0, 1):
        found = json.loads((user_folder / f"collectives-{rank}.json").read_text())
        assert found["ours"] == found["bare"] == {"c10d::allreduce_": 20}


@pytest.mark.parametrize(("every", "extra"), [(100, 0), (10, 2)])
def test_averages_over_ranks_are_computed_only_in_logging_steps(every, extra, forks: Forks, user_folder):
    """Counts the collectives of 20 steps, with no or two logging steps, after an epoch in which no metric was read."""
    (user_folder / "counts.py").write_text(COUNT_CALLBACK)
    arguments = ("--model", "counts.Net", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", str(every), "--run", f"every-{every}")
    forks.fit(*arguments, folder=user_folder, world=2)
    for rank in (0, 1):
        counts = json.loads((user_folder / f"collectives-{rank}.json").read_text())["ours"]
        assert counts.pop("c10d::allreduce_") == 20 + extra
        assert bool(counts) == bool(extra)  # between logging steps, no other collective and no read of a number
    metrics = json.loads((user_folder / f"runs/every-{every}/summary.json").read_text())["metrics"]
    assert (metrics["rank"], metrics["both_epoch"], metrics["both"], metrics["sum"]) == (0.5, 0.5, 0.5, 3.0)
    assert metrics["alone"] == 7


def test_a_run_stops_before_its_time_limit_and_starts_no_step_that_does_not_fit(forks: Forks, user_folder):
    """The margin is 10 s, and 5 s are assumed for a save that has not been measured."""
    arguments = (*CLASSES, *SLOW_RUN, "--data.count", "320", "--global_batch_size", "16", "--run", "x")
    forks.fit(*arguments, "--epochs", "100000", "--time_limit", "24s", folder=user_folder, world=2, code=75)
    stopped = summary(user_folder, "x")
    assert stopped["status"] == "stopped" and stopped["steps"] > 0 and stopped["seconds"] < 24
    forks.fit(*arguments, "--epochs", "100000", "--time_limit", "5s", folder=user_folder, world=2, code=75)
    printed = forks.outputs(user_folder)[0]
    assert printed.count("the time limit: stopping") == 1
    assert "the time limit is too short for a single step" in printed
    assert summary(user_folder, "x")["steps"] == stopped["steps"]


def test_keep_best_keeps_the_best_checkpoint_beside_the_newest(forks: Forks, user_folder):
    arguments = (*CLASSES, "--data.count", "64", "--epochs", "6", "--run", "x", "--keep", "1")
    forks.fit(*arguments, "--keep_best", "max:val_loss", folder=user_folder)
    checkpoints = checkpoints_in(user_folder / "runs/x/checkpoints")
    assert [path.name for path in checkpoints] == ["step-00000004", "step-00000024"]  # val_loss only falls
    assert summary(user_folder, "x")["best"] == "checkpoints/step-00000004"


@pytest.fixture
def small_disk(user_folder):
    with disk_at(user_folder / "runs", "512k") as disk:
        yield disk


FILL_CALLBACK = """
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
def test_a_full_disk_keeps_the_newest_checkpoint_to_resume_from(
    forks: Forks, user_folder, small_disk, empties, how, code
):
    (user_folder / "fill.py").write_text(FILL_CALLBACK)
    filling = ("--trainer.callbacks", "fill.Fill", "--trainer.callbacks.empties", f"{empties}", "--save_errors", how)
    arguments = (*CLASSES, "--data.count", "64", "--epochs", "6", "--run", "x")
    forks.fit(*arguments, *filling, folder=user_folder, world=2, code=code)
    printed = forks.outputs(user_folder)[0]
    assert "could not be saved: [Errno 28] No space left on device" in printed and "Traceback" not in printed
    assert "the newest checkpoint is runs/x/checkpoints/step-0000000" in printed
    newest, refused = newest_valid(small_disk / "x/checkpoints")
    assert newest and not refused
    assert {path.name for path in newest.parent.iterdir()} == {path.name for path in checkpoints_in(newest.parent)}
    if code == 0:
        assert newest.name == "step-00000012" and summary(user_folder, "x")["status"] == "finished"
        return
    (small_disk / "filling").unlink()
    forks.fit(*arguments, folder=user_folder, world=2)
    forks.fit(*arguments, "--run", "whole", folder=user_folder, world=2)
    assert are_equal(learned_state(small_disk / "x"), learned_state(small_disk / "whole"))
