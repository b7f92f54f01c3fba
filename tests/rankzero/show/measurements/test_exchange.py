import math
import re
import time
from math import inf, isnan, nan
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.plan import SamplingPlan
from rankzero.show.measurements import exchange as exchanges
from rankzero.show.measurements.exchange import ALWAYS_EXCHANGED, DETAILS_REQUESTED, EXCHANGED, LOSS_SUM, Exchange
from rankzero.show.measurements.interval_measurements import prepared_batches
from rankzero.show.measurements.throughput import Throughput
from rankzero.show.report.curves import DATA_WAIT, FIRST_GRADIENT, GRADIENT_NORM, SERIES
from running import REPOSITORY, train_in_process


def row(**values):
    names = {"wait": DATA_WAIT, "gradient": FIRST_GRADIENT, "norm": GRADIENT_NORM, "loss": LOSS_SUM}
    by_tag = {names[name]: value for name, value in values.items()}
    return [by_tag.get(tag, nan) for tag in EXCHANGED]


def test_values_of_the_ranks_that_have_one_are_summed_averaged_or_the_largest_is_taken():
    combined = exchanges.combine([row(wait=1.0, norm=3.0, loss=5.0), row(wait=2.0, norm=4.0, loss=6.0)])
    assert (combined[DATA_WAIT], combined[GRADIENT_NORM], combined[LOSS_SUM]) == (1.5, 4.0, 11.0)
    combined = exchanges.combine([row(wait=1.0, loss=0.0), row(loss=0.0)])
    assert combined[DATA_WAIT] == 1.0 and isnan(combined[GRADIENT_NORM])
    assert isnan(exchanges.combine([row(loss=nan), row(loss=6.0)])[LOSS_SUM])  # a sum is a number only if all parts are
    assert list(exchanges.combine([row(norm=2.0, loss=1.0)[: len(ALWAYS_EXCHANGED)]])) == list(ALWAYS_EXCHANGED)


def test_each_rank_or_each_of_the_slowest_has_a_series_and_slow_ranks_are_marked():
    values = exchanges.values_of_ranks([row(wait=1.0, gradient=10.0), row(wait=2.0, gradient=30.0)], slow_ranks=[1])
    waits = {"world/data_wait_ms/rank_000": 1.0, "world/data_wait_ms/rank_001": 2.0}
    gradients = {"rank_000": 10.0, "rank_001": 30.0, "slow_rank_001": 30.0}
    assert values == waits | {f"{FIRST_GRADIENT}/{name}": value for name, value in gradients.items()}
    values = exchanges.values_of_ranks([row(wait=float(rank)) for rank in range(100)], slow_ranks=[])
    assert list(values) == [f"world/data_wait_ms/rank_{rank:03d}" for rank in range(100 - exchanges.MAX_RANKS, 100)]


def test_every_logged_series_is_documented_and_has_a_description_with_its_unit():
    units = {"ms": "Milliseconds", "s": "Seconds", "gib": "GiB", "mib": "MiB", "percent": "percentage", "norm": "norm"}
    for tag, described in SERIES.items():
        if "/" in tag:
            unit = tag.rpartition("_")[2]
            assert described.description and units.get(unit, "") in described.description, tag
    text = (REPOSITORY / "docs/tensorboard.md").read_text()
    documented = set(re.findall(r"`((?:train|wall_time|weights|workload|world|x_axis)/\w+)", text))
    assert documented - {"train/mean_loss"} == {tag for tag in SERIES if "/" in tag} | set(
        exchanges.RANK_SERIES.values()
    )


def test_samples_of_a_managed_order_are_counted_and_the_next_attempt_continues_the_count():
    plan = SamplingPlan(world_size=2)
    plan.training_orders = [ElasticBatchSampler(25, 8, world_size=2)]
    settings = {"limit_train_batches": 4, "max_epochs": 1, "loops": True}
    first, second = Throughput(plan), Throughput(SamplingPlan())
    first.load_state_dict({"samples": 100})
    train_in_process(first, **settings)
    assert (first.samples, first.attempt_samples) == (125, 25)
    second.load_state_dict(first.state_dict())
    train_in_process(second, **settings)
    assert (second.samples, second.attempt_samples) == (129, 4)


def test_a_pause_does_not_count_as_training_time(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("rankzero.show.measurements.throughput.time.perf_counter", lambda: now[0])
    throughput = Throughput(SamplingPlan())
    with throughput.paused():  # before training
        now[0] = 20.0
    assert throughput.training_seconds == 0
    throughput.on_train_epoch_start(None, None)
    now[0] = 21.0
    with throughput.paused():
        now[0] = 50.0
    now[0] = 52.0
    assert throughput.training_seconds == 3


def test_host_is_at_most_one_tick_ahead_of_a_gpu(monkeypatch):
    queued, finished = [], []

    class Event:
        def record(self):
            queued.append(self)

        def synchronize(self):
            finished.extend(queued[len(finished) : queued.index(self) + 1])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    throughput = Throughput(SamplingPlan())
    for device in ("cpu", "cuda"):
        throughput.on_ready(SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device))))
        assert throughput.needs("on_tick") == (device == "cuda")
    for _ in range(5):
        throughput.on_tick(None, None, 0)
    assert (len(queued), len(finished)) == (5, 4), "the newest tick is still queued, the others are finished"


def trainer_with(loader):
    managed = SamplingPlan().wrap(loader, True, lambda value: value, None)
    return SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[managed]))), managed


@pytest.mark.parametrize("is_persistent", [False, True])
def test_batches_that_loader_processes_have_prepared_are_counted(is_persistent):
    settings = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": is_persistent}
    trainer, loader = trainer_with(DataLoader(torch.arange(100), batch_size=1, **settings))
    assert math.isnan(prepared_batches(trainer))
    batches = iter(loader)
    next(batches)
    while prepared_batches(trainer) < 3:
        time.sleep(0.01)
    assert prepared_batches(trainer) == 3
    loader._iterator = None
    del batches
    assert math.isnan(prepared_batches(trainer))
    trainer, loader = trainer_with(DataLoader(torch.arange(4)))
    next(iter(loader))  # without processes
    assert math.isnan(prepared_batches(trainer))


class Ranks:
    """Stands for a strategy: values of rank one are twice those of rank zero, and arrive when a test says so."""

    root_device = torch.device("cpu")

    def __init__(self):
        self.begun = []

    def begin_gather_rows(self, row):
        rows = torch.stack([row, 2 * row])
        self.begun.append(SimpleNamespace(is_complete=False, wait=lambda: rows))
        return self.begun[-1]


def test_values_of_a_device_without_float64_are_gathered_on_the_host(monkeypatch):
    monkeypatch.setattr(Ranks, "root_device", torch.device("mps"))
    exchange = Exchange(Ranks(), 1)
    exchange.begin({DETAILS_REQUESTED: 0.0, LOSS_SUM: torch.tensor(3.0)})
    assert exchange.finish()[0][EXCHANGED.index(LOSS_SUM)] == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_rank_zero_requests_details_one_exchange_ahead(world_size):
    exchange = Exchange(Ranks(), world_size)
    has_details = []
    for request in (0.0, 1.0, 0.0, 0.0):
        has_details.append(exchange.has_details)
        exchange.begin({DETAILS_REQUESTED: request})
        assert len(exchange.finish()[0]) == len(EXCHANGED if has_details[-1] else ALWAYS_EXCHANGED)
    assert has_details == [True, False, True, False]


@pytest.mark.parametrize(
    ("sums", "steps", "text"),
    [
        ([1.0, 2.0], [nan, nan], ""),
        ([nan, nan, nan], [8, 7, 8], "first in step 7 on rank 1"),
        ([nan, inf, 2.0], [7, 7, nan], "first in step 7 on ranks 0-1"),
        ([nan], [1200], "first in step 1,200"),
        ([nan, 1.0], [nan, nan], "first on rank 0"),  # on a GPU
        ([nan, nan], [nan, nan], ""),
    ],
)
def test_the_step_and_the_ranks_of_the_first_loss_that_is_not_finite_are_named(sums, steps, text):
    rows = [[own_sum, 32.0, step, 0.0, nan] for own_sum, step in zip(sums, steps, strict=True)]
    assert exchanges.first_broken(rows) == text
