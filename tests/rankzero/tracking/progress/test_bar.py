"""The bar in a pseudo-terminal, and its content compared with Lightning's bar."""

import io
import os
import re
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from rich import reconfigure

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.progress import bar as bar_module
from rankzero.tracking.progress import time_left
from rankzero.tracking.progress.bar import BarProgress, important_names
from running import REPOSITORY, SOURCES, train_in_process

WIDTHS = (40, 47, 80, 133, 200)
"""A few widths: the content of a line is tested at all widths in `test_one_line.py`."""
COUNTS = (0, 20)
"""Numbers of metrics."""

TRAIN_AT_EACH_WIDTH = """
import fcntl, logging, struct, sys, termios
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.tracking.progress import bar, time_left
from running import train_in_process

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        for number in range(count):
            self.log(f"train/metric_{number}", 0.5, prog_bar=number % 2 == 0, on_step=True, on_epoch=number > 5)
        return super().training_step(batch, batch_idx)

logging.disable(logging.INFO)
bar.BarProgress.refresh = lambda self, hard=False: self.progress and self.progress.refresh()  # draws every line
bar.REDRAW_SECONDS = bar.EVENT_SECONDS = time_left.MIN_SECONDS = 0
for columns in map(int, sys.argv[1].split(",")):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    for count in map(int, sys.argv[2].split(",")):
        print(f"<columns {columns}>")
        options = {"enable_progress_bar": True, "max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 3}
        train_in_process(bar.BarProgress(), Throughput(SamplingPlan()), model=Model(), loops=True, **options)
print("<end>")
"""


def output_in_terminal(*command):
    """Returns what a command prints in a pseudo-terminal."""
    own_end, terminal = os.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": f"{SOURCES}:{REPOSITORY / 'tests'}"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables)
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(own_end, 65536):
            chunks.append(chunk)
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    os.close(own_end)
    output = b"".join(chunks).decode()
    assert process.wait(30) == 0, output
    return output


def test_the_bar_takes_one_line_in_narrow_and_wide_terminals():
    numbers = (",".join(map(str, values)) for values in (WIDTHS, COUNTS))
    output = output_in_terminal(sys.executable, "-c", TRAIN_AT_EACH_WIDTH, *numbers)
    pieces = re.split(r"<columns (\d+)>", output.partition("<end>")[0])[1:]
    assert len(pieces) == 2 * len(COUNTS) * len(WIDTHS)
    for columns, text in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        assert "\x1b[1A" not in text, "the bar takes more than one line"
        rows = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
        bars = [row for row in rows if row.startswith(("epoch ", "validation "))]
        assert max(map(len, bars)) < columns
        assert any(row.startswith("epoch 3/3  ━") for row in bars) and any("step 12" in row for row in bars)
        assert any(row.startswith("epoch 2/3 validation") for row in bars)
        assert any(row.rstrip().endswith(" s left") for row in bars)


def shown(bar, **options):
    """Returns all lines that a bar draws in a terminal with 250 columns."""
    stream = io.StringIO()
    bar = bar(console_kwargs={"width": 250, "force_terminal": True, "file": stream})
    settings = {"enable_progress_bar": True, "max_epochs": 2, "limit_train_batches": 3, **options}
    train_in_process(bar, Throughput(SamplingPlan()), loops=True, **settings)
    reconfigure()
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()))


class ModelWithMetrics(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", 0.25, prog_bar=True)
        self.log("both", 0.5, prog_bar=True, on_step=True, on_epoch=True)
        self.log("hidden", 0.75)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", 2.0, prog_bar=True)


@pytest.fixture
def every_batch_is_drawn(monkeypatch):
    for module in ("hooks", "fast.epoch"):
        monkeypatch.setattr(f"rankzero.training.{module}.TICK_SECONDS", 0)
    for name in ("REDRAW_SECONDS", "EVENT_SECONDS"):
        monkeypatch.setattr(bar_module, name, 0)
    monkeypatch.setattr(time_left, "MIN_SECONDS", 0)


def test_the_line_has_epoch_step_metrics_speed_and_time_left(every_batch_is_drawn):
    last = [line for line in shown(BarProgress, model=ModelWithMetrics()) if line.startswith("epoch 2/2  ")][-1]
    assert re.match(
        r"epoch 2/2  ━+  step 6  loss: 0\.250  both_step: 0\.500  val: 2\.000  both_epoch: 0\.500  hidden: 0\.750  "
        r"batch 3/3  [\d,.]+ samples/s  \d+ s left *$",
        last,
    )


def test_metrics_of_the_bar_equal_those_of_lightnings_bar(every_batch_is_drawn):
    texts = {}
    for kind in (BarProgress, RichProgressBar):
        lines = [line for line in shown(kind, model=ModelWithMetrics()) if "both_epoch" in line]
        texts[kind] = re.findall(r"(?:loss|both_step|both_epoch|val): \S+", lines[-1])
    assert texts[BarProgress] == texts[RichProgressBar] and len(texts[BarProgress]) == 4


def test_a_module_that_logs_nothing_has_a_bar(every_batch_is_drawn):
    lines = shown(BarProgress, model=BoringModel())
    assert any(re.match(r"epoch 2/2  ━+  step 6  batch 3/3 ", line) for line in lines)


def test_metrics_that_are_no_numbers_and_names_that_the_terminal_cannot_encode_end_no_training(
    every_batch_is_drawn, monkeypatch
):
    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("größe\x1b[31m", 0.25, prog_bar=True)
            self.trainer.callback_metrics["vector"] = torch.ones(2)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = shown(BarProgress, model=Model())
    assert any("gr??e?[31m: 0.250" in line for line in lines)


def test_the_bar_is_redrawn_at_intervals(monkeypatch):
    calls = []
    monkeypatch.setattr(BarProgress, "_read_metrics", lambda *arguments: calls.append(1) or [])
    for module in ("hooks", "fast.epoch"):
        monkeypatch.setattr(f"rankzero.training.{module}.TICK_SECONDS", 0)
    monkeypatch.setattr(bar_module, "REDRAW_SECONDS", 1000.0)
    monkeypatch.setattr(bar_module, "EVENT_SECONDS", 1000.0)
    shown(BarProgress, max_epochs=20)
    assert len(calls) == 2  # in the first epoch, and at the end


def test_steps_fill_the_bar_if_the_length_of_the_epoch_is_unknown():
    class Steps(Callback):
        def on_train_end(self, trainer, pl_module):
            bar = trainer.progress_bar_callback
            self.fractions = [bar._fraction(trainer, 3, float("inf")), bar._fraction(trainer, 3, 6)]

    steps = Steps()
    settings = {"max_steps": 8, "max_epochs": -1, "limit_train_batches": 4, "enable_progress_bar": True}
    train_in_process(BarProgress(console_kwargs={"file": io.StringIO()}), steps, loops=True, **settings)
    reconfigure()
    assert steps.fractions == [1.0, 0.5]


def test_ended_validations_are_removed_from_the_bar():
    class Tasks(Callback):
        def on_train_end(self, trainer, pl_module):
            self.count = len(trainer.progress_bar_callback.progress.tasks)

    tasks = Tasks()
    settings = {"max_epochs": 10, "limit_train_batches": 1, "limit_val_batches": 1, "enable_progress_bar": True}
    train_in_process(BarProgress(console_kwargs={"file": io.StringIO()}), tasks, loops=True, **settings)
    reconfigure()
    assert tasks.count <= 2  # the training, and the validation before it


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_evaluation_ends_with_a_full_bar(method):
    stream = io.StringIO()
    trainer = Trainer(
        callbacks=[BarProgress(console_kwargs={"width": 80, "force_terminal": True, "file": stream})],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        **{f"limit_{'val' if method == 'validate' else method}_batches": 2},
    )  # fmt: skip
    getattr(trainer, method)(BoringModel())
    reconfigure()
    name = {"validate": "validation", "predict": "prediction"}.get(method, method)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(rf"{name}  ━+  batch 2/2", text)


def test_other_ranks_draw_no_bar():
    bar = BarProgress()
    bar.disable()
    train_in_process(bar, enable_progress_bar=True, loops=True, max_epochs=1, limit_train_batches=2)
    assert bar.progress is None


def test_loss_and_another_metric_are_important():
    assert important_names(["train/loss", "val/loss", "val/accuracy"]) == ["train/loss", "val/accuracy"]
    assert important_names(["train/loss", "val/loss"]) == ["train/loss", "val/loss"]
    assert important_names(["loss"]) == ["loss"] and important_names([]) == []
