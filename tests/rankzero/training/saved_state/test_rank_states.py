import random
from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.classification import BinaryAUROC

from rankzero.training.saved_state.rank_states import load_generators, load_metrics, save_generators, save_metrics

CPU = torch.device("cpu")


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_generators_continue_from_the_saved_state(tmp_path):
    np.random.randn()  # NumPy and `random` cache the second value of each pair
    random.gauss(0, 1)
    torch.save(save_generators(CPU), tmp_path / "state.pt")
    expected = draw(), draw()
    load_generators(torch.load(tmp_path / "state.pt", weights_only=True), CPU)
    assert (draw(), draw()) == expected


class ModuleWithMetrics(LightningModule):
    def __init__(self):
        super().__init__()
        self.scores = MetricCollection({"error": MeanAbsoluteError(), "twin": MeanAbsoluteError()})
        self.area = BinaryAUROC()
        self.untouched = MeanAbsoluteError()

    def update_metrics(self, samples):
        for sample in samples:
            outputs, targets = torch.tensor([sample % 7 / 7, 0.3]), torch.tensor([sample % 2, 1])
            self.scores.update(outputs, targets)
            self.area.update(outputs, targets)
        return self

    def values(self):
        return {**self.scores.compute(), "area": self.area.compute()}


def updated(samples):
    return ModuleWithMetrics().update_metrics(samples)


@pytest.mark.parametrize("shares", [[range(9)], [range(4), range(4, 9)], [range(2), range(2), [5], range(4, 9)]])
def test_metrics_continue_with_the_samples_of_all_ranks(shares):
    resumed = ModuleWithMetrics()
    load_metrics(resumed, [save_metrics(updated(share)) for share in shares])
    resumed.update_metrics(range(9, 20))
    expected = updated([*chain(*shares), *range(9, 20)]).values()
    for name, value in resumed.values().items():
        assert torch.allclose(value, expected[name]), name


def test_metrics_without_updates_are_not_saved():
    assert save_metrics(ModuleWithMetrics()) == {} and "untouched" not in save_metrics(updated([1]))
