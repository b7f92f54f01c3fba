import random

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


class Scored(LightningModule):
    def __init__(self):
        super().__init__()
        self.scores = MetricCollection({"error": MeanAbsoluteError(), "twin": MeanAbsoluteError()})
        self.area = BinaryAUROC()
        self.untouched = MeanAbsoluteError()

    def see(self, samples):
        for sample in samples:
            outputs, targets = torch.tensor([sample % 7 / 7, 0.3]), torch.tensor([sample % 2, 1])
            self.scores.update(outputs, targets)
            self.area.update(outputs, targets)

    def values(self):
        return {**self.scores.compute(), "area": self.area.compute()}


def seen(samples):
    module = Scored()
    module.see(samples)
    return module


@pytest.mark.parametrize("parts", [[range(9)], [range(4), range(4, 9)], [range(2), range(2), [5], range(4, 9)]])
def test_metrics_continue_with_the_samples_of_all_ranks(parts):
    carried_on = Scored()
    load_metrics(carried_on, [save_metrics(seen(part)) for part in parts])
    carried_on.see(range(9, 20))
    whole = seen([sample for part in parts for sample in part] + list(range(9, 20)))
    expected = whole.values()
    for name, value in carried_on.values().items():
        assert torch.allclose(value, expected[name]), name


def test_metrics_without_updates_are_not_saved():
    assert save_metrics(Scored()) == {} and "untouched" not in save_metrics(seen([1]))
