import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from rankzero.sampling.batch_sampler import EVEN_SHARE, Share
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.ddp import DataParallel
from rankzero.training.metrics.epoch_averages import Results
from rankzero.training.metrics.step_averages import StepAverages

OPERATIONS = ("mean", "sum", "max", "min")
INTERVAL = 3


class CountingStrategy(DataParallel):
    def __init__(self):
        super().__init__(SamplingPlan(), None, process_group_backend="gloo")
        self.parallel_devices, self.reductions = [torch.device("cpu")], 0

    def reduce(self, *arguments, **settings):
        self.reductions += 1
        return super().reduce(*arguments, **settings)

    def reduce_in_place(self, *arguments, **settings):
        self.reductions += 1
        return super().reduce_in_place(*arguments, **settings)

    def sum_over_ranks(self, numbers):
        self.reductions += 1
        return super().sum_over_ranks(numbers)


class Rank:
    """One of several ranks, which logs the same values with `StepAverages` and with stock Lightning."""

    def __init__(self, rank, world):
        self.rank, self.world, self.strategy = rank, world, CountingStrategy()
        trainer = SimpleNamespace(strategy=self.strategy, world_size=world, global_rank=rank)
        self.results, self.stock = Results(trainer), _ResultCollection(training=True)
        self.averages = self.results.averages
        self.stock_strategy = DDPStrategy(process_group_backend="gloo")
        self.stock_strategy.parallel_devices = self.strategy.parallel_devices

    def log(self, step, operations=OPERATIONS, dtype=torch.float32, group=None, fx="training_step", prefix=""):
        for operation in operations:
            number = OPERATIONS.index(operation)
            value = torch.tensor((step + 1) * 1.5 + 10 * self.rank + number, dtype=dtype)
            settings = {"reduce_fx": operation, "on_step": True, "on_epoch": number % 2 == 0, "batch_size": 2}
            settings |= {"sync_dist": True, "sync_dist_group": group}
            self.results.log(fx, prefix + operation, value, **settings)
            self.stock.log(fx, prefix + operation, value.clone(), sync_dist_fn=self.stock_strategy.reduce, **settings)

    def train(self, steps=INTERVAL, read_at=None, **settings):
        """Logs values for some steps, and averages deferred values at the end of each interval."""
        for step in range(steps):
            self.log(step, **settings)
            if step == read_at:
                self.averages.record_read()
            if step % INTERVAL == INTERVAL - 1:
                self.results.reduce()

    def observe(self, read_at=None):
        """Logs an epoch with at most one read, decides whether later values are deferred, and resets the counter."""
        self.averages.decide_deferral()
        self.train(read_at=read_at)
        self.averages.record_epoch()
        self.averages.decide_deferral()
        self.strategy.reductions = 0

    @property
    def values(self):
        return tuple(
            {kind: {name: float(value) for name, value in values.items()} for kind, values in metrics.items()}
            for metrics in (results.metrics(on_step=True) for results in (self.results, self.stock))
        )

    def equals_stock(self):
        actual, stock = self.values
        return actual == stock and bool(actual["log"])


def call_with_rank(coordinator, work, *arguments):
    return work(Rank(coordinator.launch.rank, coordinator.launch.world_size), *arguments)


def log_two_steps(rank):
    results = []
    for step in range(2):
        rank.log(step)
        results.append((rank.equals_stock(), rank.averages.defers, rank.strategy.reductions))
    rank.results.reduce()
    return results + [rank.strategy.reductions]


def train_two_epochs(rank):
    rank.observe()
    rank.train(INTERVAL - 1)
    before = rank.strategy.reductions
    rank.train()
    results = [before, rank.strategy.reductions, rank.averages.defers, rank.equals_stock()]
    rank.averages.record_epoch()
    rank.averages.decide_deferral()
    rank.train()
    rank.results.reduce()  # without deferred values
    return results + [rank.strategy.reductions, rank.equals_stock()]


def log_three_dtypes(rank):
    rank.observe()
    for step in range(INTERVAL):
        for dtype in (torch.float64, torch.float32, torch.float16):
            rank.log(step, dtype=dtype, prefix=f"{dtype} ")
    rank.results.reduce()
    return rank.equals_stock(), rank.averages.defers, rank.strategy.reductions


def read_in_first_epoch(rank, reader):
    rank.observe(read_at=1 if rank.rank == reader else None)
    rank.log(0)
    results = [rank.averages.defers, rank.equals_stock()]
    rank.averages.record_epoch()
    rank.averages.decide_deferral()  # even after an epoch without a read
    return results + [rank.averages.defers]


def read_later(rank, operations):
    rank.observe()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank.log(0, operations)
        for _ in range(2 * (rank.rank == 1)):
            rank.averages.record_read()
        logged_values = rank.values[0]["log"]
        own_value = logged_values[operations[0] + "_step" * (operations[0] in ("mean", "max"))]
        rank.log(1, operations)
        rank.results.reduce()
    results = [own_value, [str(warning.message) for warning in caught], rank.averages.defers, rank.equals_stock()]
    rank.log(2, operations)
    return results + [rank.equals_stock()]


@pytest.mark.parametrize("operations", [("min",), OPERATIONS])
def test_later_read_warns_once_and_ends_deferral_on_all_ranks(on_ranks, operations):
    first, second = on_ranks(call_with_rank, 2, read_later, operations)
    for rank, (own_value, *_) in enumerate((first, second)):  # before the average, each rank sees its own values
        assert own_value == 1.5 + 10 * rank + OPERATIONS.index(operations[0])
    assert first[1] == [] and len(second[1]) == 1
    assert "rankzero: metrics with sync_dist=True were read between two logging steps" in second[1][0]
    assert "rank 1 reads its own values" in second[1][0]
    assert first[2:] == second[2:] == [False, True, True]


def read_averaged_values(rank):
    rank.averages.record_read()  # before the first value
    rank.log(0, fx="on_train_batch_end", prefix="other ")
    rank.averages.record_read()
    rank.train()
    rank.averages.record_read()  # after the end of an interval
    rank.averages.record_epoch()
    rank.averages.decide_deferral()
    rank.train()
    rank.averages.record_read()
    rank.train()
    return rank.averages.defers, rank.equals_stock()


def log_undeferred_values(rank):
    rank.observe()
    results = []
    for settings in ({"group": torch.distributed.group.WORLD}, {"fx": "on_train_batch_end"}):
        rank.strategy.reductions, settings["prefix"] = 0, next(iter(settings))
        rank.log(0, **settings)
        results.append((rank.equals_stock(), rank.strategy.reductions))
    return results


def log_with_an_empty_rank(rank):
    rank.observe()
    rank.log(0)
    rank.strategy.share = Share(1 - rank.rank, 1, 2.0 * (1 - rank.rank), 2.0 * (1 - rank.rank), True)
    rank.log(1)
    rank.strategy.share = EVEN_SHARE
    reductions = rank.strategy.reductions
    rank.results.reduce()
    return reductions, rank.strategy.reductions, rank.equals_stock()


def log_with_shares(rank):
    rank.observe()
    rank.strategy._metric_weight = (1.5, 0.5)[rank.rank]
    rank.log(0)
    rank.strategy._metric_weight = 1.0
    rank.results.reduce()
    return rank.values[0]["log"]["mean_step"], rank.values[0]["log"]["sum"]


COUNT = len(OPERATIONS)
EVERY_STEP = [(True, False, COUNT), (True, False, 2 * COUNT), 2 * COUNT]
CASES = {
    "every step is averaged until an epoch was observed": (2, log_two_steps, [], EVERY_STEP),
    # Means and sums share one reduction.
    "unread values are averaged once an interval, on 2 ranks": (2, train_two_epochs, [], [0, 3, True, True, 6, True]),
    "unread values are averaged once an interval, on 3 ranks": (3, train_two_epochs, [], [0, 3, True, True, 6, True]),
    # Of two dtypes, since Lightning converts float16 to float32.
    "deferred values are averaged separately per dtype": (2, log_three_dtypes, [], (True, True, 2 * 3)),
    "a read on rank 0 in the first epoch prevents deferral": (2, read_in_first_epoch, [0], [False, True, False]),
    "a read on rank 1 in the first epoch prevents deferral": (2, read_in_first_epoch, [1], [False, True, False]),
    "a read of averaged values does not end deferral": (2, read_averaged_values, [], (True, True)),
    "values of a group or another hook are not deferred": (2, log_undeferred_values, [], [(True, COUNT)] * 2),
    # The averaged value replaces a deferred value of the same name.
    "a step with an empty rank is averaged immediately": (2, log_with_an_empty_rank, [], (COUNT, COUNT, True)),
    "a mean has the weights of its own step": (2, log_with_shares, [], (1.5 * 0.75 + 11.5 * 0.25, (1.5 + 11.5) + 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_equal_lightnings_and_are_averaged_when_due(on_ranks, case):
    world, work, arguments, expected = CASES[case]
    assert on_ranks(call_with_rank, world, work, *arguments) == [expected] * world


def log_an_epoch(rank):
    rank.observe()
    rank.results.reset()
    rank.train(operations=("mean",))
    metric = rank.results["training_step.mean"]
    return float(metric.value), float(metric._forward_cache)


def test_epoch_values_stay_local_to_each_rank_within_the_epoch(on_ranks):
    """With `on_epoch`, each rank adds up the values of its steps; the ranks' sums are added at the end of the epoch."""
    local_sums = [sum((step + 1) * 1.5 + 10 * rank for step in range(INTERVAL)) * 2 for rank in (0, 1)]
    averaged = 1.5 * INTERVAL + 5
    assert on_ranks(call_with_rank, 2, log_an_epoch) == [(total, averaged) for total in local_sums]


def test_one_process_never_defers_values():
    averages = StepAverages(SimpleNamespace(world_size=1))
    for _ in range(3):
        averages.decide_deferral()
        averages.record_epoch()
    assert not averages.defers
    averages.reduce({})
    averages.record_read()
