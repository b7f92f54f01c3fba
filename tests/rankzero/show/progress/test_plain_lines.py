import re
from itertools import pairwise

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.sampling.plan import SamplingPlan
from rankzero.show.measurements.throughput import Throughput
from rankzero.show.progress.plain_lines import PlainProgress
from rankzero.text import rough_duration
from running import train_in_process

pytestmark = pytest.mark.usefixtures("tick_after_every_batch")


class LoggingModel(BoringModel):
    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train/loss", 0.25)
        return step


class SimulatedClock(Callback):
    """A clock that advances by a fixed time in each epoch of two batches."""

    def __init__(self, epoch_seconds=0.0):
        self.seconds, self.epoch_seconds = 0.0, epoch_seconds

    def __call__(self):
        return self.seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seconds += self.epoch_seconds / 2


@pytest.fixture
def lines_of(capsys):
    """Returns a function that trains with a callback, and returns the printed lines of epochs and validations."""

    def train(progress, *callbacks, model=None, **options):
        settings = {"enable_progress_bar": True, "loops": True, "limit_train_batches": 2, **options}
        train_in_process(progress, *callbacks, model=model or LoggingModel(), **settings)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("epoch", "validation"))]

    return train


def after_every_batch():
    """Prints a line after each batch: its time stands still, and the interval is zero."""
    return PlainProgress(interval_seconds=0, clock=SimulatedClock())


def heads(lines):
    return [line.split("  ")[0] for line in lines]


@pytest.mark.parametrize(
    ("options", "stops_after", "ends"),
    [
        ({"max_epochs": 5}, None, ["epoch 1/5 done  step 2", "epoch 5/5 done  step 10"]),
        ({"max_steps": 7, "max_epochs": -1}, None, ["epoch 1 done  step 2", "epoch 4 done  step 7"]),
        ({"max_epochs": 50}, 4, ["epoch 1/50 done  step 2", "epoch 4/50 done  step 8"]),
    ],
)
def test_the_first_and_the_last_epoch_print_a_line_whatever_ends_the_run(lines_of, options, stops_after, ends):
    class Stop(LoggingModel):
        def on_train_epoch_end(self):
            self.trainer.should_stop = self.trainer.current_epoch + 1 == stops_after

    lines = lines_of(PlainProgress(interval_seconds=3600), model=Stop(), **options)
    assert ["  ".join(line.split("  ")[:2]) for line in lines] == ends and "train/loss 0.25" in lines[-1]


def test_a_resumed_run_prints_its_own_first_and_last_epoch(lines_of, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    lines_of(checkpoint, limit_train_batches=4, max_epochs=2, enable_checkpointing=True)
    settings = {"limit_train_batches": 4, "max_epochs": 3, "resume": tmp_path / "step=5.ckpt"}
    lines = lines_of(PlainProgress(interval_seconds=3600), **settings)
    assert [line.split("  ")[:2] for line in lines] == [["epoch 2/3 done", "step 8"], ["epoch 3/3 done", "step 12"]]


def test_a_long_epoch_and_validations_print_progress_lines_with_the_speed_unless_disabled(lines_of):
    settings = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 3}
    lines = lines_of(after_every_batch(), Throughput(SamplingPlan()), **settings)
    assert heads(lines) == [
        *("validation before training, batch 1/2", "validation before training, batch 2/2"),
        *("epoch 1/1 batch 1/3", "epoch 1/1 batch 2/3"),
        *(f"epoch 1/1 validation batch {batch}/3" for batch in (1, 2, 3)),
        "epoch 1/1 done",
    ]
    assert " samples/s  " in lines[3]
    disabled = after_every_batch()
    disabled.disable()
    assert lines_of(disabled, **settings) == []


def test_a_short_validation_prints_no_line_of_its_own(lines_of):
    clock = SimulatedClock(epoch_seconds=100.0)
    lines = lines_of(PlainProgress(clock=clock), clock, max_epochs=5, limit_val_batches=2)
    assert len(lines) >= 5 and not any("validation" in line for line in lines)


@pytest.mark.parametrize(("epochs", "epoch_seconds", "most"), [(200, 0.001, 2), (200, 1.0, 20), (1000, 600.0, 300)])
def test_many_epochs_print_few_lines(lines_of, epochs, epoch_seconds, most):
    class Idle(BoringModel):
        """Steps without an optimizer: a thousand epochs take less than a second."""

        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.log("train/loss", 0.25)

        def configure_optimizers(self):
            return None

    clock = SimulatedClock(epoch_seconds)
    lines = lines_of(PlainProgress(clock=clock), clock, model=Idle(), max_epochs=epochs, limit_val_batches=0)
    assert 2 <= len(lines) <= most and max(map(len, lines)) <= 120
    ends = [head for head in heads(lines) if head.endswith(" done")]
    assert (ends[0], ends[-1]) == (f"epoch 1/{epochs} done", f"epoch {epochs}/{epochs} done")


def test_intervals_and_time_left_follow_the_duration_of_the_run(lines_of):
    clock = SimulatedClock(epoch_seconds=60.0)  # each step takes 30 s
    lines = lines_of(PlainProgress(clock=clock), clock, max_epochs=200, limit_val_batches=0)
    line_of = {int(re.search(r"step (\d+)", line)[1]): line for line in lines}
    steps = list(line_of)
    assert steps[:10] == list(range(1, 11)), "a step takes more than 10 s, and than a tenth of the first 5 minutes"
    assert [later - earlier for earlier, later in pairwise(steps[10:16])] == [2, 2, 2, 2, 2]
    assert steps[-2] - steps[-3] == 30 and steps[-1] == 400
    assert line_of[1].endswith("  30 s") and line_of[400].endswith("  3 h 20 min")
    for step in steps[1:-1]:
        elapsed = f"{30 * step} s" if step < 20 else rough_duration(30 * step)
        assert line_of[step].endswith(f"  {elapsed}, {rough_duration(30 * (400 - step))} left")
