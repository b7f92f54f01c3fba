import re
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset

from rankzero.runs.reports.text import rough_duration
from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.progress.plain_lines import PlainProgress, interval_after
from running import train_in_process


@pytest.fixture
def tick_after_every_batch(monkeypatch):
    for module in ("hooks", "fast.epoch"):
        monkeypatch.setattr(f"rankzero.training.{module}.TICK_SECONDS", 0)


class EveryBatch(PlainProgress):
    """Prints a line after each batch: its time stands still, and the interval is zero."""

    def __init__(self):
        super().__init__(interval_seconds=0, clock=lambda: 0.0)


class LoggingModel(BoringModel):
    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train/loss", 0.25)
        return step


def epoch_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]


def progress_lines(callback, capsys, **options):
    train_in_process(
        callback, model=LoggingModel(), enable_progress_bar=True, limit_train_batches=3, loops=True, **options
    )
    return epoch_lines(capsys)


def test_only_first_and_last_epoch_print_a_line_within_the_interval(capsys):
    lines = progress_lines(PlainProgress(interval_seconds=3600), capsys, max_epochs=5)
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/5 done", "epoch 5/5 done"]
    assert "step 15" in lines[-1] and "train/loss 0.25" in lines[-1]


@pytest.mark.usefixtures("tick_after_every_batch")
def test_long_epoch_prints_progress_lines(capsys):
    lines = progress_lines(EveryBatch(), capsys, max_epochs=1)
    heads = [line.split("  ")[0] for line in lines if "validation" not in line]
    assert heads == ["epoch 1/1 batch 1/3", "epoch 1/1 batch 2/3", "epoch 1/1 done"]


def test_disabled_progress_prints_nothing(capsys):
    callback = EveryBatch()
    callback.disable()
    assert progress_lines(callback, capsys, max_epochs=1) == []


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_long_evaluation_prints_progress_lines(capsys, method):
    trainer = Trainer(
        callbacks=[EveryBatch()], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_model_summary=False, **{f"limit_{'val' if method == 'validate' else method}_batches": 2}
    )  # fmt: skip
    getattr(trainer, method)(BoringModel())
    name = {"validate": "validation", "predict": "prediction"}.get(method, method)
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if " batch " in line]
    assert lines == [f"{name} batch {number}/2" for number in (1, 2)]


def test_long_validation_within_an_epoch_prints_progress_lines(capsys):
    lines = progress_lines(EveryBatch(), capsys, max_epochs=1, limit_val_batches=2)
    assert [line.split("  ")[0] for line in lines if "validation" in line][-2:] == [
        f"epoch 1/1 validation batch {number}/2" for number in (1, 2)
    ]


def test_a_short_validation_prints_no_line_of_its_own(capsys):
    clock = SimulatedClock(epoch_seconds=100.0)
    options = {"limit_train_batches": 2, "limit_val_batches": 2, "loops": True, "enable_progress_bar": True}
    train_in_process(PlainProgress(clock=clock), clock, model=LoggingModel(), max_epochs=5, **options)
    lines = epoch_lines(capsys)
    assert len(lines) >= 5 and not any("validation" in line for line in lines)


class ModelWithManyMetrics(BoringModel):
    def training_step(self, batch, batch_idx):
        for number in range(20):
            self.log(f"train/metric_{number}", 0.123456, prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_plain_line_has_at_most_120_columns(capsys):
    train_in_process(
        EveryBatch(),
        model=ModelWithManyMetrics(),
        enable_progress_bar=True,
        max_epochs=2,
        limit_train_batches=3,
    )
    lines = epoch_lines(capsys)
    assert all(len(line) <= 120 for line in lines)
    step_lines = [line for line in lines if "  step " in line]
    assert step_lines and all(" more  " in line for line in step_lines)


class SimulatedClock(Callback):
    """A clock that advances by a fixed time in each epoch of two batches."""

    def __init__(self, epoch_seconds):
        self.seconds, self.epoch_seconds = 0.0, epoch_seconds

    def __call__(self):
        return self.seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seconds += self.epoch_seconds / 2


def lines_of_simulated_run(capsys, epoch_seconds, **options):
    clock = SimulatedClock(epoch_seconds)
    options = {"limit_train_batches": 2, "limit_val_batches": 0, "loops": True, "enable_progress_bar": True} | options
    train_in_process(PlainProgress(clock=clock), clock, model=LoggingModel(), **options)
    return epoch_lines(capsys)


@pytest.mark.parametrize(("epochs", "epoch_seconds", "most"), [(200, 0.001, 2), (200, 1.0, 20), (1000, 600.0, 300)])
@pytest.mark.usefixtures("tick_after_every_batch")
def test_many_epochs_print_few_lines(capsys, epochs, epoch_seconds, most):
    lines = lines_of_simulated_run(capsys, epoch_seconds, max_epochs=epochs)
    assert 2 <= len(lines) <= most and max(map(len, lines)) <= 120
    ends = [line.split("  ")[0] for line in lines if " done  " in line]
    assert (ends[0], ends[-1]) == (f"epoch 1/{epochs} done", f"epoch {epochs}/{epochs} done")


@pytest.mark.usefixtures("tick_after_every_batch")
def test_intervals_and_time_left_follow_the_duration_of_the_run(capsys):
    lines = lines_of_simulated_run(capsys, 60.0, max_epochs=200)  # each step takes 30 s
    line_of = {int(re.search(r"step (\d+)", line)[1]): line for line in lines}
    steps = list(line_of)
    assert steps[:10] == list(range(1, 11)), "a step takes more than 10 s, and than a tenth of the first 5 minutes"
    assert [later - earlier for earlier, later in pairwise(steps[10:16])] == [2, 2, 2, 2, 2]
    assert steps[-2] - steps[-3] == 30 and steps[-1] == 400
    assert line_of[1].endswith("  30 s") and line_of[400].endswith("  3 h 20 min")
    for step in steps[1:-1]:
        elapsed = f"{30 * step} s" if step < 20 else rough_duration(30 * step)
        assert line_of[step].endswith(f"  {elapsed}, {rough_duration(30 * (400 - step))} left")


def test_the_number_of_lines_is_bounded():
    lines, counts, hours = 0, {}, {"100 s": 100 / 3600, "15 min": 0.25, "2 h": 2.0, "1 d": 24.0, "30 d": 720.0}
    elapsed = 0.0
    for name, end in hours.items():
        while elapsed < end * 3600:
            elapsed += interval_after(elapsed)
            lines += 1
        counts[name] = lines
    assert counts == {"100 s": 10, "15 min": 34, "2 h": 55, "1 d": 131, "30 d": 302}


@pytest.mark.parametrize("options", [{"max_steps": 7, "max_epochs": -1}, {"max_epochs": 50, "stops": 4}])
def test_the_last_epoch_gets_a_line_whatever_ends_the_run(capsys, options):
    class Stop(LoggingModel):
        def on_train_epoch_end(self):
            self.trainer.should_stop = self.trainer.current_epoch + 1 == options.get("stops")

    settings = {name: value for name, value in options.items() if name != "stops"}
    settings |= {"limit_train_batches": 2, "loops": True, "enable_progress_bar": True}
    train_in_process(PlainProgress(interval_seconds=3600), model=Stop(), **settings)
    heads = [line.split("  ")[0] for line in epoch_lines(capsys)]
    total = "" if "max_steps" in options else "/50"
    assert heads == [f"epoch 1{total} done", f"epoch 4{total} done"]


def test_a_resumed_run_prints_its_own_first_and_last_epoch(capsys, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    settings = {"limit_train_batches": 4, "loops": True, "enable_progress_bar": True, "max_epochs": 3}
    train_in_process(checkpoint, model=LoggingModel(), enable_checkpointing=True, **{**settings, "max_epochs": 2})
    train_in_process(
        PlainProgress(interval_seconds=3600), model=LoggingModel(), resume=tmp_path / "step=5.ckpt", **settings
    )
    heads = [line.split("  ")[:2] for line in epoch_lines(capsys)]
    assert heads == [["epoch 2/3 done", "step 8"], ["epoch 3/3 done", "step 12"]]


@pytest.mark.usefixtures("tick_after_every_batch")
def test_lines_state_the_training_speed(capsys):
    train_in_process(
        EveryBatch(), Throughput(SamplingPlan()), loops=True, max_epochs=2, limit_train_batches=4,
        enable_progress_bar=True,
    )  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 2/2 batch 3")]
    assert lines and " samples/s  " in lines[0]


class UnmeteredData(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(6, 32))


@pytest.mark.usefixtures("tick_after_every_batch")
def test_epochs_of_unknown_length_print_lines_without_a_total(capsys):
    class Model(LoggingModel):
        def train_dataloader(self):
            return DataLoader(UnmeteredData())

    settings = {"max_epochs": 2, "loops": True, "enable_progress_bar": True, "limit_val_batches": 0}
    train_in_process(EveryBatch(), model=Model(), **settings)
    heads = [line.split("  ")[0] for line in epoch_lines(capsys)]
    assert heads[:3] == ["epoch 1/2 batch 1", "epoch 1/2 batch 2", "epoch 1/2 batch 3"]
