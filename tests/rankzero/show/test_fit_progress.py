"""Figures of real fits, with a simulated clock."""

from math import inf
from types import SimpleNamespace

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from rankzero.sampling.plan import SamplingPlan
from rankzero.show.fit_progress import FitProgress
from rankzero.show.measurements.throughput import Throughput
from rankzero.training.callbacks.safe_point import SafePoint
from rankzero.training.hooks import LoopCallback
from running import train_in_process

pytestmark = pytest.mark.usefixtures("tick_after_every_batch")


class Simulation(LoopCallback):
    """Advances a clock by 2 s in each batch and 5 s in each validation, and records the time left after each batch."""

    def __init__(self):
        self.now, self.progress = 0.0, None
        self.estimates, self.epoch_ends, self.epoch_starts, self.validated_after = [], [], [], []

    def on_train_start(self, trainer, pl_module):
        self.progress = FitProgress(trainer, lambda: self.now)

    def on_train_epoch_start(self, trainer, pl_module):
        self.progress.begin_epoch()
        self.epoch_starts.append(self.progress.seconds_left)

    def on_train_epoch_end(self, trainer, pl_module):
        self.epoch_ends.append(self.progress.seconds_left)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now += 2

    def on_tick(self, trainer, batch, batch_idx):
        self.progress.tick()
        self.estimates.append((self.now, self.progress.seconds_left))

    def on_validation_start(self, trainer, pl_module):
        if self.progress is not None:
            self.progress.begin_validation()
            self.now += 5

    def on_validation_end(self, trainer, pl_module):
        if self.progress is not None:
            self.progress.end_validation()
            self.validated_after.append(len(self.estimates))

    @property
    def errors(self):
        """The differences between the stated and the actual time left, once a batch and a validation were measured."""
        assert self.estimates[0][1] is None, "the first batch is not measured"
        first = self.validated_after[0] if self.validated_after else 1
        return [at + estimate - self.now for at, estimate in self.estimates[first:]]


def simulate(*callbacks, simulation=None, **options):
    simulation = simulation or Simulation()
    settings = {"max_epochs": 4, "limit_train_batches": 10, "num_sanity_val_steps": 0, "loops": True, **options}
    train_in_process(simulation, *callbacks, **settings)
    return simulation


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"limit_train_batches": 0.25}, {"limit_val_batches": 0}, {"accumulate_grad_batches": 2}),
        *({"max_steps": 23, "max_epochs": -1}, {"max_steps": 23}, {"max_steps": 1000}),
        *({"max_steps": 11, "max_epochs": -1, "accumulate_grad_batches": 2}, {"val_check_interval": 4}),
        *({"val_check_interval": 5}, {"val_check_interval": 7, "check_val_every_n_epoch": None}),
        *({"check_val_every_n_epoch": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 5}),
    ],
    ids=str,
)
def test_time_left_is_exact_once_a_validation_was_measured(options):
    errors = simulate(**options).errors
    assert len(errors) >= 10 and errors == pytest.approx([0] * len(errors), abs=0.01)


def test_time_left_is_the_same_at_the_end_of_an_epoch_and_at_the_start_of_the_next():
    simulation = simulate()  # between two batches, no time passes but a validation
    assert simulation.epoch_starts[0] is None and simulation.epoch_starts[1:] == simulation.epoch_ends[:-1]
    assert simulation.epoch_starts[1:] == pytest.approx([3 * 25, 2 * 25, 25])


@pytest.mark.parametrize("step", [5, 12, 18])
def test_time_left_of_a_run_resumed_in_mid_epoch_is_exact(tmp_path, step):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    simulate(checkpoint, max_epochs=2, enable_checkpointing=True)
    resumed = simulate(resume=tmp_path / f"step={step}.ckpt")
    assert len(resumed.estimates) == 40 - step
    assert len(resumed.errors) >= 20 and resumed.errors == pytest.approx([0] * len(resumed.errors), abs=0.01)


def test_time_limits_are_read_and_that_of_the_job_includes_the_last_save(monkeypatch):
    def limit_with(*callbacks, end=None):
        class Limited(Simulation):
            def on_fit_start(self, trainer, pl_module):
                trainer.fit_loop.extra_subscribers += [SafePoint(SimpleNamespace(), end, None, None)] if end else []

            def on_train_start(self, trainer, pl_module):
                super().on_train_start(trainer, pl_module)
                self.limit = min(self.progress._seconds_to_time_limits())
                trainer.fit_loop.extra_subscribers.clear()

        return simulate(*callbacks, simulation=Limited()).limit

    assert limit_with() == inf
    assert 7100 < limit_with(Timer(duration={"hours": 2})) <= 7200
    monkeypatch.setattr("rankzero.training.callbacks.safe_point.time", SimpleNamespace(monotonic=lambda: 100.0))
    assert limit_with(end=1000.0) == 900 - 10 - 5


def test_training_speed_counts_all_batches_and_no_validation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rankzero.show.measurements.throughput.time.perf_counter", lambda: now[0])

    class Seconds(Callback):
        def on_train_batch_start(self, *arguments):
            now[0] += 2

        def on_validation_batch_start(self, *arguments):
            now[0] += 50

    throughput = Throughput(SamplingPlan())
    progress = simulate(throughput, Seconds(), max_epochs=2, limit_train_batches=4, num_sanity_val_steps=2).progress
    assert (throughput.samples, throughput.seconds) == (8, 16)  # the loader has a batch size of one
    assert progress.samples_per_second == throughput.samples_per_second == pytest.approx(0.5)


def test_pauses_for_drawing_do_not_change_the_time_left():
    def estimates(pause):
        simulation, throughput = Simulation(), Throughput(SamplingPlan())

        class Drawing(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                simulation.now += pause
                throughput.paused_seconds += pause

        simulate(throughput, Drawing(), simulation=simulation, max_epochs=2, limit_train_batches=4)
        return [seconds for _, seconds in simulation.estimates]

    assert estimates(pause=100.0) == estimates(pause=0.0) != []


class Batches:
    """A run of steps with one batch each; `trainer` has what `FitProgress` reads."""

    def __init__(self, max_epochs=None, max_steps=-1, epoch_batches=100, validates=False, interval=inf):
        counts = {name: SimpleNamespace(processed=0) for name in ("total", "current")}
        self.now, self.counts = 0.0, SimpleNamespace(is_last_batch=False, **counts)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=self.counts))
        settings = {"max_epochs": max_epochs, "max_steps": max_steps, "num_training_batches": epoch_batches}
        settings |= {"enable_validation": validates, "val_check_batch": interval, "check_val_every_n_epoch": 1}
        settings |= {"callbacks": [], "current_epoch": 0, "global_step": 0, "num_val_batches": []}
        self.trainer = SimpleNamespace(fit_loop=loop, **settings)
        self.progress = FitProgress(self.trainer, lambda: self.now)

    def train(self, count, seconds=1.0):
        for _ in range(count):
            self.now += seconds
            self.counts.total.processed += 1
            self.counts.current.processed += 1
            self.trainer.global_step += 1
            self.progress.tick()


def after_60_batches(validation_seconds=0.0, **settings):
    """Returns the progress after 60 batches of a second and one validation."""
    (run := Batches(**settings)).train(50)
    run.progress.begin_validation()
    run.now += validation_seconds
    run.progress.end_validation()
    run.train(10)
    return run.progress


def test_a_slower_run_is_noticed_and_validations_at_intervals_of_time_continue_at_the_measured_rate():
    run = Batches(max_epochs=1, epoch_batches=100_000)
    run.train(999)
    run.train(3001, seconds=4.0)
    assert run.progress.seconds_left == pytest.approx(96_000 * 4, rel=0.01)
    progress = after_60_batches(validation_seconds=30.0, max_epochs=3, validates=True, interval=None)
    assert progress.seconds_left == pytest.approx(240 + 240 * 30 / 59)  # 59 of 60 batches were measured


@pytest.mark.parametrize(
    ("limits", "time_limit", "seconds"),
    [
        ({"max_epochs": 10}, inf, 940),
        ({"max_epochs": 10, "max_steps": 100}, inf, 40),
        ({"max_epochs": 10}, 30.0, 30),
        ({}, inf, None),
        ({}, 30.0, 30),
        ({"max_steps": 80, "epoch_batches": inf}, inf, 20),
    ],
    ids=str,
)
def test_the_first_limit_counts_and_an_unlimited_run_has_no_time_left(monkeypatch, limits, time_limit, seconds):
    monkeypatch.setattr(FitProgress, "_seconds_to_time_limits", lambda self: [time_limit])
    assert after_60_batches(**limits).seconds_left == (seconds and pytest.approx(seconds))
