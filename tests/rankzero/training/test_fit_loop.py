"""Hooks at the ends of steps and epochs, and where a run with a user's sampler resumes."""

import importlib

import pytest
from lightning.pytorch import Trainer

from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from running import as_before, fit_here, train_here


class Watch(LoopCallback):
    def __init__(self):
        self.seen = []

    def note(self, what, trainer):
        loop = fit_loop_of(trainer)
        self.seen.append((what, loop.epochs_done, loop.epoch_loop.batches_done, loop.is_within_epoch))

    def on_train_start(self, trainer, pl_module):
        self.note("start", trainer)

    def on_ready(self, trainer):
        self.note("ready", trainer)

    def on_validation_end(self, trainer, pl_module):
        self.note("validated", trainer)

    def on_step_done(self, trainer):
        self.note("step", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.note("epoch end", trainer)

    def on_epoch_done(self, trainer):
        self.note("epoch", trainer)


def watch(**settings):
    watching = Watch()
    train_here(watching, loops=True, limit_train_batches=4, num_sanity_val_steps=0, **settings)
    return watching.seen


def test_step_is_done_after_its_validation_and_epoch_after_its_hooks():
    assert watch(max_epochs=1, val_check_interval=2) == [
        ("start", 0, 0, False),
        ("ready", 0, 0, False),
        ("step", 0, 1, True),
        ("validated", 0, 2, True),
        ("step", 0, 2, True),
        ("step", 0, 3, True),
        ("validated", 0, 4, True),
        ("step", 0, 4, True),
        ("epoch end", 1, 4, False),
        ("epoch", 1, 4, False),
    ]


def test_on_step_done_is_called_once_per_accumulated_step():
    steps = [seen for seen in watch(max_epochs=1, accumulate_grad_batches=3) if seen[0] == "step"]
    assert [batches for _, _, batches, _ in steps] == [3, 4]


def test_on_epoch_done_is_not_called_for_an_incomplete_epoch():
    assert [what for what, *_ in watch(max_steps=6) if what == "epoch"] == ["epoch"]


OWN_SAMPLER = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

PLACES = []


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        PLACES.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        sampler = WeightedRandomSampler(torch.ones(32), 32)
        return DataLoader(TensorDataset(torch.rand(32, 2)), batch_size=4, sampler=sampler)
"""


@pytest.mark.parametrize(("first", "then"), [(3, 6), (11, 13)])
def test_user_sampler_resumes_after_max_steps_at_the_same_batch_as_in_lightning(first, then, here, monkeypatch):
    (here / "own_sampler.py").write_text(OWN_SAMPLER)
    monkeypatch.syspath_prepend(here)
    own_sampler = importlib.import_module("own_sampler")
    own_sampler.PLACES.clear()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with as_before():
        for steps in (first, then):
            trainer = Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", enable_model_summary=False, **quiet)
            trainer.fit(own_sampler.Net(), ckpt_path="stock.ckpt" if steps == then else None)
            trainer.save_checkpoint("stock.ckpt")
    stock = list(own_sampler.PLACES)
    own_sampler.PLACES.clear()
    for steps in (first, then):
        fit_here("--model", "own_sampler.Net", "--run", "x", "--trainer.max_steps", str(steps))
    assert stock == own_sampler.PLACES and stock[first][1] == first % 8
