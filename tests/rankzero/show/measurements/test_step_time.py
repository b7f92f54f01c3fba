from types import SimpleNamespace

import pytest
import torch

from rankzero.distributed.monitoring import activity as activity_module
from rankzero.distributed.monitoring.activity import BACKWARD, CHECKPOINT, FORWARD, HOOK, OPTIMIZER, Activity
from rankzero.show.measurements import step_time as step_time_module
from rankzero.show.measurements.step_time import MAX_EVENTS, StepTime


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(activity_module, "monotonic", lambda: clock.now)
    return clock


def take_step(activity, clock, trainer, **milliseconds):
    phases = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "other": HOOK}
    activity.begin_batch(trainer.global_step)
    clock.now += milliseconds.pop("data_wait") / 1e3
    for name, duration in milliseconds.items():
        activity.enter(phases[name])
        clock.now += duration / 1e3
    trainer.global_step += 1
    trainer.fit_loop.epoch_loop.steps_done += 1


def measured(device="cpu"):
    """Returns an activity, a trainer on a device, and the measurement of its steps."""
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(steps_done=0))
    strategy = SimpleNamespace(root_device=torch.device(device), model=None)
    activity, trainer = Activity(), SimpleNamespace(strategy=strategy, global_step=0, fit_loop=loop)
    return activity, trainer, StepTime(activity, trainer)


PARTS = {"data_wait": 5.0, "forward": 10.0, "backward": 20.0, "optimizer": 3.0, "other": 2.0}


def test_parts_of_a_step_are_means_over_the_steps_of_the_interval_without_validation_and_checkpoints(clock):
    activity, trainer, step_time = measured()
    for factor in (1, 3):
        take_step(activity, clock, trainer, **{name: factor * duration for name, duration in PARTS.items()})
    for phase in (activity_module.VALIDATION, CHECKPOINT, HOOK):
        activity.enter(phase)
        clock.now += 7
    times = step_time.take()
    expected = {name: 2 * duration for name, duration in PARTS.items()} | {"step": 80, "exposed_communication": 0}
    assert {name: times[f"wall_time/{name}_ms"] for name in expected} == pytest.approx(expected)
    assert times["wall_time/checkpoint_blocked_s"] == pytest.approx(7)
    take_step(activity, clock, trainer, **{**PARTS, "forward": 1.0})
    activity.enter(HOOK)
    assert step_time.take()["wall_time/forward_ms"] == pytest.approx(1)  # without earlier intervals


def test_communication_after_the_backward_pass_is_a_part_of_its_own(clock, monkeypatch):
    class Wrapped(torch.nn.Module):
        def _get_ddp_logging_data(self):
            return {"backward_comm_time": 9_000_000, "backward_compute_comm_overlap_time": 3_000_000}

    monkeypatch.setattr(step_time_module, "DistributedDataParallel", Wrapped)
    activity, trainer, step_time = measured()
    trainer.strategy.model = Wrapped()
    take_step(activity, clock, trainer, **PARTS)
    activity.enter(HOOK)
    times = step_time.take()
    assert times["wall_time/exposed_communication_ms"] == pytest.approx(6)
    assert times["wall_time/backward_ms"] == pytest.approx(14)


@pytest.fixture
def events(clock, monkeypatch):
    """Simulates the events of a CUDA device, since no test of this project has run on CUDA; returns their number."""
    count = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            count.append(self)

        def record(self):
            self.time = clock.now + 50  # the device runs later than the main thread

        def query(self):
            return True

        def elapsed_time(self, end):
            return 1e3 * (end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return count


def test_an_accelerators_phases_are_measured_by_events_also_without_an_optimizer_step_and_unknown_before(clock, events):
    activity, _, step_time = measured("cuda:0")
    step_time.measure_step()
    for _ in range(2 * MAX_EVENTS):
        activity.enter(FORWARD)
        activity.begin_batch(0)
    assert not activity.listeners and len(events) <= MAX_EVENTS + 2  # ended although no optimizer step was counted
    activity, trainer, step_time = measured("cuda:0")
    for step in (0, 1):
        activity.begin_batch(step)
        activity.enter(FORWARD)
    times = step_time.take()
    assert {"wall_time/step_ms", "wall_time/data_wait_ms"} <= times.keys() and "wall_time/forward_ms" not in times
    activity, trainer, step_time = measured("cuda:0")
    for is_last_batch in (False, True):  # of two batches per step
        step_time.measure_step()
        for phase, duration in ((FORWARD, 0.005), (BACKWARD, 0.01), (OPTIMIZER, 0.003 * is_last_batch), (HOOK, 0.25)):
            activity.enter(phase)
            clock.now += duration
        assert activity.listeners
        activity.begin_batch(int(is_last_batch))
    trainer.global_step = 1
    assert not activity.listeners
    times, expected = step_time.take(), {"forward": 10, "backward": 20, "optimizer": 3, "step": 533}
    assert {name: times[f"wall_time/{name}_ms"] for name in expected} == pytest.approx(expected)
