import time

import pytest
from lightning.pytorch import Callback

from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from running import train_in_process


class SlowValidation(Callback):
    def on_validation_batch_end(self, *args):
        time.sleep(0.3)


def train(throughput, **options):
    train_in_process(throughput, SlowValidation(), limit_train_batches=4, max_epochs=1, loops=True, **options)


def test_samples_of_a_managed_order_are_counted():
    plan = SamplingPlan(world_size=2)
    plan.training_orders = [ElasticBatchSampler(25, 8, world_size=2)]
    throughput = Throughput(plan)
    train(throughput)
    assert throughput.samples == 25


def test_batches_of_an_unmanaged_order_are_counted():
    throughput = Throughput(SamplingPlan())
    train(throughput)
    assert throughput.samples == 4  # BoringModel's loaders have a batch size of one


def test_validation_does_not_count_as_training_time():
    throughput = Throughput(SamplingPlan())
    train(throughput)
    assert throughput.seconds < 0.3
    assert throughput.samples_per_second == pytest.approx(4 / throughput.seconds)


def test_a_pause_does_not_count_as_training_time(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("rankzero.tracking.measurements.throughput.time.perf_counter", lambda: now[0])
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


def test_sample_count_continues_in_the_next_attempt():
    first, second = Throughput(SamplingPlan()), Throughput(SamplingPlan())
    first.load_state_dict({"samples": 100})
    second.load_state_dict(first.state_dict())
    train(second)
    assert (second.samples, second.attempt_samples) == (104, 4)
