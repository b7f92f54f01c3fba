import pytest
from lightning.pytorch import Callback

from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from running import train_in_process


@pytest.fixture
def now(monkeypatch):
    """Returns a list with the time, which a test advances."""
    now = [10.0]
    monkeypatch.setattr("rankzero.tracking.measurements.throughput.time.perf_counter", lambda: now[0])
    return now


def train(throughput, *callbacks):
    train_in_process(throughput, *callbacks, limit_train_batches=4, max_epochs=1, loops=True)


def test_samples_of_a_managed_order_are_counted_and_the_next_attempt_continues_the_count():
    plan = SamplingPlan(world_size=2)
    plan.training_orders = [ElasticBatchSampler(25, 8, world_size=2)]
    first, second = Throughput(plan), Throughput(SamplingPlan())
    first.load_state_dict({"samples": 100})
    train(first)
    assert (first.samples, first.attempt_samples) == (125, 25)
    second.load_state_dict(first.state_dict())
    train(second)
    assert (second.samples, second.attempt_samples) == (129, 4)


def test_batches_of_an_unmanaged_order_are_counted_and_validation_is_no_training_time(now):
    class Seconds(Callback):
        def on_train_batch_end(self, *arguments):
            now[0] += 2

        def on_validation_batch_end(self, *arguments):
            now[0] += 50

    throughput = Throughput(SamplingPlan())
    train(throughput, Seconds())
    assert throughput.samples == 4  # BoringModel's loaders have a batch size of one
    assert throughput.seconds == 8 and throughput.samples_per_second == pytest.approx(0.5)


def test_a_pause_does_not_count_as_training_time(now):
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
