"""Counts the collectives of a step, beside those of bare DistributedDataParallel."""

import json

import pytest

from system.forks import fit_on_ranks

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


@pytest.mark.parametrize(("every", "extra"), [(100, {}), (10, {"c10d::_allgather_base_": 2})])
def test_each_value_with_sync_dist_takes_one_reduction_a_step_as_in_lightning(every, extra, user_folder):
    """Counts the collectives of 20 steps with four such values, and no or two logging steps."""
    (user_folder / "counts.py").write_text(COUNT_CALLBACK)
    arguments = ("--model", "counts.Net", "--data", "Toy", "--epochs", "2", "--trainer.callbacks", "counts.Count")
    arguments += ("--global_batch_size", "32", "--trainer.log_every_n_steps", str(every), "--run", f"every-{every}")
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    for rank in (0, 1):
        counts = json.loads((user_folder / f"collectives-{rank}.json").read_text())["ours"]
        assert counts.pop("aten::item") >= 20  # on a CPU, each loss is read at once
        # Lightning puts a barrier before each reduction of a value.
        assert counts == {"c10d::allreduce_": 20 + 4 * 20, "c10d::barrier": 4 * 20, **extra}
    metrics = json.loads((user_folder / f"runs/every-{every}/summary.json").read_text())["metrics"]
    assert (metrics["rank"], metrics["both_epoch"], metrics["both"], metrics["sum"]) == (0.5, 0.5, 0.5, 3.0)
    assert metrics["alone"] == 7
