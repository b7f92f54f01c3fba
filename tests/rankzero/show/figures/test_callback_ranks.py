"""Figures of a run on two ranks, one of which has no sample in the validation."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero.distributed.environments.cluster import LaunchEnvironment
from rankzero.distributed.monitoring.activity import Activity
from rankzero.runs.directory import RunDirectory
from rankzero.sampling.plan import SamplingPlan
from rankzero.show.figures import drawing
from rankzero.show.figures.callback import RunFigures
from rankzero.show.figures.class_counts import ClassCounts
from rankzero.show.measurements.throughput import Throughput
from rankzero.training.ddp import DataParallel
from rankzero.training.fit_loop import install
from rankzero.training.metrics import epoch_averages
from stock import SILENT


class Net(LightningModule):
    def __init__(self, fails_on):
        super().__init__()
        self.layer, self.fails_on = nn.Linear(2, 3), fails_on

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].mean((2, 3))), batch[1])

    def validation_step(self, batch, batch_idx):
        targets = batch[1] + 9 if self.global_rank == self.fails_on else batch[1]
        return {"logits": self.layer(batch[0].mean((2, 3))), "targets": targets}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count):
    images = torch.rand(count, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(images, torch.arange(count) % 3), batch_size=2)


def fail(*_):
    raise RuntimeError("it failed")


def train(coordinator, folder, samples, failure=None):
    """Trains for three epochs; returns drawn samples, epochs, and number of warnings."""
    world, drawn = coordinator.world, []

    def draw(publisher, validation, names):
        drawn.append(int(validation.counts.samples.sum()))
        if failure == "drawing":
            fail()

    plan = SamplingPlan(world.rank, world.size, global_batch_size=4)
    figures = RunFigures(RunDirectory(folder), Throughput(plan), Activity())
    settings = {"devices": 1, "use_distributed_sampler": False, "plugins": [LaunchEnvironment(world)], **SILENT}
    trainer = Trainer(strategy=DataParallel(plan, coordinator, process_group_backend="gloo"), max_epochs=3, **settings)
    trainer.callbacks[:0] = [install(trainer, plan), figures]
    epoch_averages.install(trainer)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw_validation", draw)
        if failure == "counting" and world.rank == 1:
            patch.setattr(ClassCounts, "add", fail)
        warnings.simplefilter("always")
        trainer.fit(Net(failure), loader(8), loader(samples))
    return drawn, trainer.current_epoch, sum("figures" in str(warning.message) for warning in caught)


def train_all(coordinator, folder, cases):
    return [train(coordinator, folder / str(number), *case) for number, case in enumerate(cases)]


def test_each_sample_of_all_ranks_counts_once_and_an_error_on_any_rank_ends_figures_on_all(on_ranks, tmp_path):
    expected = {("drawing",): [7], (0,): [], (1,): [], ("counting",): []}  # failure -> drawn samples
    cases = [(1,), (7,), *((7, *failure) for failure in expected)]
    first, second = on_ranks(train_all, 2, tmp_path, cases)
    for samples, (drawn, *_), other in zip((1, 7), first, second, strict=False):
        assert set(drawn) == {samples} and len(drawn) >= 2 and other == ([], 3, 0)
    assert first[2:] == [(drawn, 3, 1) for drawn in expected.values()]
    assert second[2:] == [([], 3, 0)] * len(expected)
