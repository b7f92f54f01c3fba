from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from running import train_in_process


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
