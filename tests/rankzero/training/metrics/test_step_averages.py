"""Averages of several ranks, which are processes here, compared with those of stock Lightning value by value."""

import multiprocessing
import os
import traceback
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.distributed import FileStore

from rankzero.sampling.batch_sampler import EVEN, Share
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.ddp import DataParallel
from rankzero.training.metrics.epoch_averages import Results
from rankzero.training.metrics.step_averages import StepAverages

OPERATIONS = ("mean", "sum", "max", "min")
INTERVAL = 3


class Counting(DataParallel):
    """Counts how often ranks exchange values."""

    def __init__(self):
        super().__init__(SamplingPlan(), None, process_group_backend="gloo")
        self.parallel_devices, self.exchanges = [torch.device("cpu")], 0

    def reduce(self, *arguments, **settings):
        self.exchanges += 1
        return super().reduce(*arguments, **settings)

    def reduce_together(self, *arguments, **settings):
        self.exchanges += 1
        return super().reduce_together(*arguments, **settings)

    def add_up(self, numbers):
        self.exchanges += 1
        return super().add_up(numbers)


class Rank:
    """Logs the same values with `StepAverages` and with stock Lightning, on one rank of several."""

    def __init__(self, rank, world):
        self.rank, self.world, self.strategy = rank, world, Counting()
        trainer = SimpleNamespace(strategy=self.strategy, world_size=world, global_rank=rank)
        self.averages = StepAverages(trainer)
        self.results, self.stock = Results(self.averages), _ResultCollection(training=True)
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
        """Trains for some steps, and averages what waits at the end of each interval."""
        for step in range(steps):
            self.log(step, **settings)
            if step == read_at:
                self.averages.note_read()
            if step % INTERVAL == INTERVAL - 1:
                self.results.reduce()

    def observe(self, read_at=None):
        """An epoch without a read, or with one, and the decision before the next."""
        self.averages.decide()
        self.train(read_at=read_at)
        self.averages.note_epoch()
        self.averages.decide()
        self.strategy.exchanges = 0

    @property
    def values(self):
        return tuple(
            {place: {name: float(value) for name, value in one.items()} for place, one in metrics.items()}
            for metrics in (results.metrics(on_step=True) for results in (self.results, self.stock))
        )

    def is_stock(self):
        ours, stock = self.values
        return ours == stock and bool(ours["log"])


def rank_of(work, rank, world, store, answer):
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
        answer.put(work(Rank(rank, world)))
        torch.distributed.barrier()
        code = 0
    except BaseException:
        answer.put(traceback.format_exc())
    finally:
        os._exit(code)


@pytest.fixture
def on_ranks(tmp_path):
    """Does some work on each rank; returns what each rank made of it."""

    def run(world, work):
        context = multiprocessing.get_context("fork")
        answers = [context.SimpleQueue() for _ in range(world)]
        store = str(tmp_path / f"store-{work.__name__}")
        ranks = [
            context.Process(target=rank_of, args=(work, rank, world, store, answers[rank])) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found = [answer.get() for answer in answers]
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * world, found
        return found

    return run


def test_until_an_epoch_was_observed_each_value_is_averaged_in_each_step_as_in_lightning(on_ranks):
    def work(rank):
        found = []
        for step in range(2):
            rank.log(step)
            found.append((rank.is_stock(), rank.averages.defers, rank.strategy.exchanges))
        rank.results.reduce()
        return found + [rank.strategy.exchanges]

    count = len(OPERATIONS)
    assert on_ranks(2, work) == [[(True, False, count), (True, False, 2 * count), 2 * count]] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_values_that_no_rank_reads_are_averaged_together_at_the_end_of_the_interval(on_ranks, world):
    """Means and sums share one exchange; the logged values are those of Lightning."""

    def work(rank):
        rank.observe()
        rank.train(INTERVAL - 1)
        before = rank.strategy.exchanges
        rank.train()
        results = [before, rank.strategy.exchanges, rank.averages.defers, rank.is_stock()]
        rank.averages.note_epoch()
        rank.averages.decide()
        rank.train()
        rank.results.reduce()  # when nothing waits
        return results + [rank.strategy.exchanges, rank.is_stock()]

    assert on_ranks(world, work) == [[0, 3, True, True, 6, True]] * world


def test_each_number_type_is_averaged_in_its_own_precision(on_ranks):
    def work(rank):
        rank.observe()
        for step in range(INTERVAL):
            for dtype in (torch.float64, torch.float32, torch.float16):
                rank.log(step, dtype=dtype, prefix=f"{dtype} ")
        rank.results.reduce()
        return rank.is_stock(), rank.averages.defers, rank.strategy.exchanges

    assert on_ranks(2, work) == [(True, True, 2 * 3)] * 2  # Lightning makes float32 of float16


@pytest.mark.parametrize("reader", [0, 1])
def test_a_rank_that_reads_in_the_first_epoch_keeps_all_ranks_to_each_step(on_ranks, reader):
    def work(rank):
        rank.observe(read_at=1 if rank.rank == reader else None)
        rank.log(0)
        found = [rank.averages.defers, rank.is_stock()]
        rank.averages.note_epoch()
        rank.averages.decide()  # also after an epoch without a read
        return found + [rank.averages.defers]

    assert on_ranks(2, work) == [[False, True, False]] * 2


@pytest.mark.parametrize("operations", [("min",), OPERATIONS])
def test_a_later_read_is_warned_of_once_and_ends_the_waiting_on_all_ranks(on_ranks, operations):
    def work(rank):
        rank.observe()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rank.log(0, operations)
            for _ in range(2 * (rank.rank == 1)):
                rank.averages.note_read()
            shown = rank.values[0]["log"]
            own = shown[operations[0] + "_step" * (operations[0] in ("mean", "max"))]
            rank.log(1, operations)
            rank.results.reduce()
        found = [own, [str(one.message) for one in caught], rank.averages.defers, rank.is_stock()]
        rank.log(2, operations)
        return found + [rank.is_stock()]

    first, second = on_ranks(2, work)
    for rank, (own, *_) in enumerate((first, second)):  # until then, each rank sees its own values
        assert own == 1.5 + 10 * rank + OPERATIONS.index(operations[0])
    assert first[1] == [] and len(second[1]) == 1
    assert "rankzero: metrics with sync_dist=True were read between two logging steps" in second[1][0]
    assert "rank 1 reads its own values" in second[1][0]
    assert first[2:] == second[2:] == [False, True, True]


def test_a_read_of_values_that_have_been_averaged_changes_nothing(on_ranks):
    def work(rank):
        rank.averages.note_read()  # before the first value
        rank.log(0, fx="on_train_batch_end", prefix="other ")
        rank.averages.note_read()
        rank.train()
        rank.averages.note_read()  # behind the end of an interval
        rank.averages.note_epoch()
        rank.averages.decide()
        rank.train()
        rank.averages.note_read()
        rank.train()
        return rank.averages.defers, rank.is_stock()

    assert on_ranks(2, work) == [(True, True)] * 2


def test_values_of_a_group_or_of_another_hook_never_wait(on_ranks):
    def work(rank):
        rank.observe()
        found = []
        for settings in ({"group": torch.distributed.group.WORLD}, {"fx": "on_train_batch_end"}):
            rank.strategy.exchanges, settings["prefix"] = 0, next(iter(settings))
            rank.log(0, **settings)
            found.append((rank.is_stock(), rank.strategy.exchanges))
        return found

    assert on_ranks(2, work) == [[(True, len(OPERATIONS))] * 2] * 2


def test_a_step_in_which_a_rank_has_no_sample_is_averaged_at_once(on_ranks):
    """Its value replaces one that waits under the same name."""

    def work(rank):
        rank.observe()
        rank.log(0)
        rank.strategy.share = Share(1 - rank.rank, 1, 2.0 * (1 - rank.rank), 2.0 * (1 - rank.rank), True)
        rank.log(1)
        rank.strategy.share = EVEN
        exchanges = rank.strategy.exchanges
        rank.results.reduce()
        return exchanges, rank.strategy.exchanges, rank.is_stock()

    assert on_ranks(2, work) == [(len(OPERATIONS), len(OPERATIONS), True)] * 2


def test_a_mean_that_waited_is_weighed_by_the_shares_of_its_own_step(on_ranks):
    def work(rank):
        rank.observe()
        rank.strategy._part = (1.5, 0.5)[rank.rank]
        rank.log(0)
        rank.strategy._part = 1.0
        rank.results.reduce()
        return rank.values[0]["log"]

    for found in on_ranks(2, work):
        assert found["mean_step"] == 1.5 * 0.75 + 11.5 * 0.25 and found["sum"] == (1.5 + 11.5) + 2


def test_epoch_values_are_those_of_each_rank_until_they_are_gathered(on_ranks):
    """`on_epoch` sums the values of steps up; the sums of ranks are added at the end of the epoch."""

    def work(rank):
        rank.observe()
        rank.results.reset()
        rank.train(operations=("mean",))
        metric = rank.results["training_step.mean"]
        return float(metric.value), float(metric._forward_cache)

    own = [sum((step + 1) * 1.5 + 10 * rank for step in range(INTERVAL)) * 2 for rank in (0, 1)]
    shared = 1.5 * INTERVAL + 5
    assert on_ranks(2, work) == [(own[0], shared), (own[1], shared)]


def test_one_process_never_waits():
    averages = StepAverages(SimpleNamespace(world_size=1))
    for _ in range(3):
        averages.decide()
        averages.note_epoch()
    assert not averages.defers
    averages.reduce({})
    averages.note_read()
