import io

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from rich import reconfigure

from rankzero.tracking.progress.bar import BarProgress
from rankzero.tracking.progress.choice import progress_callbacks
from rankzero.tracking.progress.plain_lines import PlainProgress
from running import train_in_process


class LoggingModel(BoringModel):
    def training_step(self, batch, batch_idx):
        step = super().training_step(batch, batch_idx)
        self.log("train/loss", 0.25)
        return step


def progress_lines(callback, capsys, **options):
    train_in_process(
        callback, model=LoggingModel(), enable_progress_bar=True, limit_train_batches=3, loops=True, **options
    )
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]


def test_only_first_and_last_epoch_print_a_line_within_the_interval(capsys):
    lines = progress_lines(PlainProgress(interval_seconds=3600), capsys, max_epochs=5)
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/5 done", "epoch 5/5 done"]
    assert "step 15" in lines[-1] and "train/loss 0.25" in lines[-1]


def test_long_epoch_prints_progress_lines(capsys, monkeypatch):
    for module in ("hooks", "fast.epoch"):
        monkeypatch.setattr(f"rankzero.training.{module}.TICK_SECONDS", 0)
    lines = progress_lines(PlainProgress(interval_seconds=0), capsys, max_epochs=1)
    assert [line.split("  ")[0] for line in lines][:3] == [f"epoch 1/1 batch {n}/3" for n in (1, 2, 3)]


def test_disabled_progress_prints_nothing(capsys):
    callback = PlainProgress(interval_seconds=0)
    callback.disable()
    assert progress_lines(callback, capsys, max_epochs=1) == []


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_long_evaluation_prints_progress_lines(capsys, method):
    trainer = Trainer(
        callbacks=[PlainProgress(interval_seconds=0)], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_model_summary=False, **{f"limit_{'val' if method == 'validate' else method}_batches": 2}
    )  # fmt: skip
    getattr(trainer, method)(BoringModel())
    name = {"validate": "validation", "predict": "prediction"}.get(method, method)
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if " batch " in line]
    assert lines == [f"{name} batch {number}/2" for number in (1, 2)]


def test_long_validation_within_an_epoch_prints_progress_lines(capsys):
    lines = progress_lines(PlainProgress(interval_seconds=0), capsys, max_epochs=1, limit_val_batches=2)
    assert [line.split("  ")[0] for line in lines if "validation" in line][-2:] == [
        f"epoch 1/1 validation batch {number}/2" for number in (1, 2)
    ]


def test_the_bar_counts_epochs_from_one(capsys):
    assert any("epoch 2/2" in line for line in progress_lines(BarProgress(), capsys, max_epochs=2))


class ModelWithManyMetrics(BoringModel):
    def training_step(self, batch, batch_idx):
        for number in range(20):
            self.log(f"train/metric_{number}", 0.123456, prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_plain_line_has_at_most_120_columns(capsys):
    train_in_process(
        PlainProgress(0), model=ModelWithManyMetrics(), enable_progress_bar=True, max_epochs=2, limit_train_batches=3
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert all(len(line) <= 120 for line in lines)
    step_lines = [line for line in lines if "  step " in line]
    assert step_lines and all(" more  " in line for line in step_lines)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_bar_fits_on_one_terminal_line(columns):
    from lightning.pytorch.callbacks import RichProgressBar

    class Height(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            bar = trainer.progress_bar_callback
            self.lines = bar._console.render_lines(bar.progress.get_renderable())

    heights = {}
    for kind in (BarProgress, RichProgressBar):
        height = Height()
        settings = {"width": columns, "force_terminal": True, "file": io.StringIO()}
        bar = kind(console_kwargs=settings)
        options = {"loops": True, "enable_progress_bar": True, "max_epochs": 1, "limit_train_batches": 3}
        train_in_process(bar, height, model=ModelWithManyMetrics(), **options)
        heights[kind] = len(height.lines)
    reconfigure()
    assert heights[BarProgress] == 1 < heights[RichProgressBar]


@pytest.mark.parametrize("launcher", ["local", "torchrun", "env", "mpi", "pbs", "slurm"])
def test_a_job_prints_plain_lines_also_in_a_pseudo_terminal(monkeypatch, launcher):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    (callback,) = progress_callbacks({}, [], launcher)
    assert isinstance(callback, BarProgress if launcher in ("local", "torchrun", "env") else PlainProgress)
