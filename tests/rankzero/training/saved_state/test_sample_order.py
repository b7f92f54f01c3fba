import json
import random
from itertools import chain

import numpy as np
import pytest
import torch
from boring_models import ShuffledNet
from lightning.pytorch import LightningModule
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.classification import BinaryAUROC

from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan, resume_order
from rankzero.training.hooks import LoopCallback
from rankzero.training.saved_state.rank_states import load_generators, load_metrics, save_generators, save_metrics
from running import train_in_process


class RecordOrders(LoopCallback):
    """Records the order at each safe point, as a checkpoint stores it."""

    def __init__(self):
        self.orders = []

    def on_safe_point(self, trainer):
        self.orders.append(json.loads(json.dumps(trainer.fit_loop.stored_order)))


def orders(plan, *loaders, **settings):
    recorder = RecordOrders()
    settings = {"max_epochs": 2, "limit_val_batches": 0, **settings}
    train_in_process(recorder, model=ShuffledNet(*loaders), plan=plan, **settings)
    return recorder.orders


@pytest.mark.parametrize("world", [1, 2, 3])
def test_order_counts_epochs_steps_and_samples_and_resumes_on_any_number_of_ranks(world):
    saved = SamplingPlan(seed=3)
    found = orders(saved)
    steps = [Position(epoch, step, 8 * step) if step else Position(epoch) for epoch in (0, 1) for step in range(4)]
    positions = [[Position(**position) for position in order["positions"]] for order in found]
    assert positions == [[position] for position in (*steps, Position(2))]
    assert saved.data["samples"] == "29"
    settings = {"seed": 3, "global_batch_sizes": [8], "data": saved.data}
    for order in found:
        assert order == {"positions": order["positions"], **settings}
        plan = SamplingPlan(0, world, seed=3)
        assert resume_order(plan, {"rankzero": {"order": order}}, "x", False) is None
        assert [vars(position) for position in plan.start_positions] == order["positions"]
        assert (plan.kept_sizes, plan.kept_data) == ([8], order["data"])


def test_each_loader_has_its_own_position():
    found = orders(SamplingPlan(), ShuffledNet.loader(), ShuffledNet.loader(count=8, batch_size=4), max_epochs=1)
    assert found[0]["global_batch_sizes"] == [8, 4]
    steps_and_passes = [[(start["step"], start["pass_index"]) for start in order["positions"]] for order in found[1:4]]
    # At last, the shorter loader has begun its second pass.
    assert steps_and_passes == [[(1, 0), (1, 0)], [(2, 0), (2, 0)], [(3, 0), (1, 1)]]


@pytest.mark.filterwarnings("ignore")
def test_unmanaged_loader_has_no_saved_order():
    plan = SamplingPlan()
    assert set(map(str, orders(plan, ShuffledNet.stream(), max_epochs=1))) == {"None"}
    assert plan.order is None


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
