"""The collectives of a step, beside those of bare DistributedDataParallel, and what two ranks log of it."""

import json
from itertools import chain
from statistics import fmean

import pytest
from reported import scalars_of

from system.forks import fit_on_ranks, summary

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
        self.layer, self.losses = torch.nn.Linear(20, 1), []  # the losses of the samples of each step

    def training_step(self, batch, batch_idx):
        losses = self.layer(batch[0]).square().squeeze(1)
        self.losses.append(losses.tolist())
        loss = losses.mean()
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("rank", float(self.global_rank), sync_dist=True)
        self.log("both", loss * 0 + self.global_rank, sync_dist=True, on_epoch=True)
        self.log("sum", loss * 0 + 1 + self.global_rank, sync_dist=True, reduce_fx="sum")
        if self.global_rank == 0:
            self.log("alone", loss * 0 + 7, sync_dist=True, rank_zero_only=True)
        return loss

    def on_train_end(self):
        with open(f"losses-{self.global_rank}.json", "w") as file:
            json.dump(self.losses, file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""


def test_a_step_needs_no_more_collectives_than_bare_ddp(user_folder):
    """Counts the collectives of 20 steps, with sample ledger, stop agreement, metrics and a time limit."""
    (user_folder / "counts.py").write_text(COUNT_CALLBACK)
    arguments = ("--model", "MLP", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", "100", "--time_limit", "2h")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    for rank in (0, 1):
        found = json.loads((user_folder / f"collectives-{rank}.json").read_text())
        assert found["bare"] == {"c10d::allreduce_": 20}
        assert found["ours"] == {"c10d::allreduce_": 20, "aten::item": 20}  # on a CPU, each loss is read at once


@pytest.mark.parametrize(
    ("every", "extra", "settings"),
    [
        (100, {}, ()),
        (10, {"c10d::_allgather_base_": 2}, ()),
        (10, {"c10d::_allgather_base_": 2}, ("--trainer.profiler", "simple")),  # Lightning's own loop
    ],
)
def test_each_value_with_sync_dist_takes_one_reduction_a_step_as_in_lightning(every, extra, settings, user_folder):
    """Counts the collectives of 20 steps with four such values, and no or two logging steps.

    The logged loss is the mean over the samples of both ranks; the last step of an epoch has half as many.
    """
    (user_folder / "counts.py").write_text(COUNT_CALLBACK)
    arguments = ("--model", "counts.Net", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--data.count", "2000", "--global_batch_size", "32", "--trainer.log_every_n_steps", str(every))
    fit_on_ranks(*arguments, *settings, "--run", "x", folder=user_folder, world=2)
    for rank in (0, 1):
        counts = json.loads((user_folder / f"collectives-{rank}.json").read_text())["ours"]
        assert counts.pop("aten::item") >= 20  # on a CPU, each loss is read at once
        # Lightning also puts a barrier before each reduction of a value.
        assert counts == {"c10d::allreduce_": 20 + 4 * 20, **extra}
    metrics = summary(user_folder, "x")["metrics"]
    assert (metrics["rank"], metrics["both_epoch"], metrics["both"], metrics["sum"]) == (0.5, 0.5, 0.5, 3.0)
    assert metrics["alone"] == 7
    losses = [json.loads((user_folder / f"losses-{rank}.json").read_text()) for rank in (0, 1)]
    steps = [first + second for first, second in zip(*losses, strict=True)]
    means = {end: fmean(chain(*steps[end - every + 1 : end + 1])) for end in range(every - 1, len(steps), every)}
    curves = scalars_of(user_folder / "runs/x")
    assert curves["train/loss"] == pytest.approx(means, rel=1e-5)
    assert all(every - 1 in curves[f"world/data_wait_ms/rank_{rank:03d}"] for rank in (0, 1))
