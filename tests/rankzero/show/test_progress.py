import fcntl
import io
import os
import re
import struct
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from rich import reconfigure
from rich.console import Console

from rankzero.sampling.plan import SamplingPlan
from rankzero.show import fit_progress
from rankzero.show import progress as progress_module
from rankzero.show.fit_progress import RecentRate
from rankzero.show.measurements.throughput import Throughput
from rankzero.show.progress import BarProgress, Line, Part, PlainProgress, fitting, progress_callbacks, without_progress
from rankzero.text import rough_duration
from running import train_in_process
from stock import SILENT

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


@pytest.fixture(autouse=True)
def restore_console():
    yield
    reconfigure()


@pytest.fixture
def every_batch_is_drawn(tick_after_every_batch, monkeypatch):
    for name in ("REDRAW_SECONDS", "EVENT_SECONDS"):
        monkeypatch.setattr(progress_module, name, 0)
    monkeypatch.setattr(fit_progress, "MIN_SECONDS", 0)


@pytest.fixture
def terminal(monkeypatch):
    """Returns a function that calls another one with a pseudo-terminal of a width, and returns the printed text."""

    def read(end):
        text = b""
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while chunk := os.read(end, 65536):
                text += chunk
        return text.decode()

    def call(columns, function):
        with ExitStack() as stack, monkeypatch.context() as patch:
            own_end, end = os.openpty()
            stack.callback(os.close, own_end)
            fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            stdin = os.dup(0)
            stack.callback(os.close, stdin)
            printed = stack.enter_context(ThreadPoolExecutor(1)).submit(read, own_end)
            stack.callback(os.dup2, stdin, 0)
            os.dup2(end, 0)  # rich asks standard input for the width
            patch.setattr("sys.stdout", stack.enter_context(open(end, "w", encoding="utf-8")))  # noqa: PTH123
            patch.setenv("TERM", "xterm-256color")
            for name in ("COLUMNS", "LINES", "NO_COLOR"):
                patch.delenv(name, raising=False)
            reconfigure()
            function()
        return printed.result()

    return call


def rows_of(text):
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


@pytest.mark.parametrize("columns", [40, 47, 80, 133, 200])  # a test below draws a line at all widths
@pytest.mark.parametrize("metrics", [0, 20])
def test_the_bar_takes_one_line_in_narrow_and_wide_terminals(columns, metrics, terminal, every_batch_is_drawn):
    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            for number in range(metrics):
                self.log(f"train/metric_{number}", 0.5, prog_bar=number % 2 == 0, on_step=True, on_epoch=number > 5)
            return super().training_step(batch, batch_idx)

    def train():
        settings = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 3, "enable_progress_bar": True}
        train_in_process(BarProgress(), Throughput(SamplingPlan()), model=Model(), loops=True, **settings)

    text = terminal(columns, train)
    assert "\x1b[1A" not in text, "the bar takes more than one line"
    bars = [row for row in rows_of(text) if row.startswith(("epoch ", "validation "))]
    assert max(map(len, bars)) < columns
    assert any(re.match(r"epoch 3/3  ━+  step 12 ", row) for row in bars)
    assert any(re.match(r"epoch 3/3  ━+  step 12  batch 4/4 ", row) for row in bars) or metrics or columns < 80
    assert any(row.startswith("epoch 2/3 validation") for row in bars)
    assert any(row.rstrip().endswith(" s left") for row in bars)


def shown(kind, **options):
    """Returns all lines that a bar draws in a terminal with 250 columns."""
    stream = io.StringIO()
    console = {"width": 250, "force_terminal": True, "file": stream}
    bar = BarProgress(Console(**console)) if kind is BarProgress else kind(console_kwargs=console)
    options = {"enable_progress_bar": True, "max_epochs": 2, "limit_train_batches": 3, **options}
    train_in_process(bar, Throughput(SamplingPlan()), loops=True, **options)
    reconfigure()
    return rows_of(stream.getvalue())


def test_the_line_has_epoch_step_speed_time_left_and_the_metrics_as_in_lightnings_bar(every_batch_is_drawn):
    class ModelWithMetrics(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("loss", 0.25, prog_bar=True)
            self.log("both", 0.5, prog_bar=True, on_step=True, on_epoch=True)
            self.log("hidden", 0.75)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val", 2.0, prog_bar=True)

    own, stock = (shown(kind, model=ModelWithMetrics()) for kind in (BarProgress, RichProgressBar))
    assert re.match(
        r"epoch 2/2  ━+  step 6  loss: 0\.250  both_step: 0\.500  val: 2\.000  both_epoch: 0\.500  hidden: 0\.750  "
        r"batch 3/3  [\d,.]+ samples/s  \d+ s left *$",
        [line for line in own if line.startswith("epoch 2/2  ")][-1],
    )
    lasts = [[line for line in lines if "both_epoch" in line][-1] for lines in (own, stock)]
    own_metrics, metrics = (re.findall(r"(?:loss|both_step|both_epoch|val): \S+", last) for last in lasts)
    assert own_metrics == metrics and len(metrics) == 4


def test_odd_metrics_and_names_that_the_terminal_cannot_encode_end_no_training(every_batch_is_drawn, monkeypatch):
    class Model(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("größe\x1b[31m", 0.25, prog_bar=True)
            self.trainer.callback_metrics["vector"] = torch.ones(2)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert any("gr??e?[31m: 0.250" in line for line in shown(BarProgress, model=Model()))


def test_the_bar_is_redrawn_at_intervals(tick_after_every_batch, monkeypatch):
    calls = []
    monkeypatch.setattr(BarProgress, "_read_metrics", lambda *arguments: calls.append(1) or [])
    for name in ("REDRAW_SECONDS", "EVENT_SECONDS"):
        monkeypatch.setattr(progress_module, name, 1000.0)
    shown(BarProgress, max_epochs=20)
    assert len(calls) == 2  # in the first epoch, and at the end


def test_the_line_stays_after_an_error_and_other_ranks_draw_none():
    class Failing(BoringModel):
        def on_train_epoch_end(self):
            raise ZeroDivisionError

    stream = io.StringIO()
    bar = BarProgress(Console(width=80, force_terminal=True, file=stream))
    with pytest.raises(ZeroDivisionError):
        train_in_process(bar, model=Failing(), loops=True, enable_progress_bar=True)
    text = stream.getvalue()
    assert rows_of(text)[-2].startswith("epoch 1/") and text.endswith("\x1b[?25h")  # the cursor is shown again
    stream.truncate(0)
    bar.disable()
    train_in_process(bar, loops=True, enable_progress_bar=True, max_epochs=1)
    assert not stream.getvalue()


def test_a_job_prints_plain_lines_also_in_a_pseudo_terminal_and_a_closed_stdout_has_no_bar(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found = {name: progress_callbacks({}, [], name) for name in ("local", "torchrun", "env", "mpi", "pbs", "slurm")}
    assert [type(callback) for (callback,) in found.values()] == [*[BarProgress] * 3, *[PlainProgress] * 3]
    monkeypatch.setattr("sys.stdout", None)
    (callback,) = progress_callbacks({}, [], "local")
    assert isinstance(callback, PlainProgress)


class OwnBar(BarProgress):
    """A user's bar."""


def test_a_users_bar_replaces_ours_disabled_progress_has_no_callback_and_a_quiet_run_keeps_what_the_user_requested():
    for arguments in ({"enable_progress_bar": False}, {"barebones": True}):
        assert progress_callbacks(arguments, [], "local") == []
    assert progress_callbacks({}, [RichProgressBar()], "local") == progress_callbacks({}, [OwnBar()], "local") == []
    assert without_progress({}, []) == {"enable_progress_bar": False, "enable_model_summary": False}
    assert without_progress({}, [OwnBar()]) == {"enable_model_summary": False}
    assert without_progress({"enable_model_summary": True}, [OwnBar()]) == {"enable_model_summary": True}
    assert without_progress({"barebones": True}, []) == {"barebones": True, "enable_progress_bar": False}


IMPORTANCE = {"epoch 3/20": 0, "": 2, "step 58": 3, "train/loss: 0.123": 4, "710 samples/s": 5, "43 s left": 1}
PARTS = [Part(text, importance) for text, importance in IMPORTANCE.items()]


def test_less_important_parts_are_left_out_first_unless_more_important_ones_do_not_fit():
    assert [[part.text for part in fitting(PARTS, columns)] for columns in (200, 60, 40, 30, 12)] == [
        ["epoch 3/20", "", "step 58", "train/loss: 0.123", "710 samples/s", "43 s left"],
        ["epoch 3/20", "", "step 58", "train/loss: 0.123", "43 s left"],
        ["epoch 3/20", "", "step 58", "43 s left"],
        ["epoch 3/20", "", "43 s left"],
        ["epoch 3/20"],
    ]
    parts = [Part("epoch 1", 0), Part("x" * 50, 1), Part("step 3", 2)]
    assert [part.text for part in fitting(parts, 20)] == ["epoch 1", "step 3"]


@pytest.mark.parametrize(
    "parts", [PARTS, [Part("損失: 0.1 " * 5, 0), *PARTS], [Part("x" * 300, 0)]], ids=["usual", "wide", "too long"]
)
def test_a_line_is_never_wrapped_and_keeps_the_last_column_free(parts):
    for columns in range(1, 201):
        console = Console(file=io.StringIO(), width=columns)
        (row,) = console.render_lines(Line(parts, 0.5))
        text = "".join(segment.text for segment in row).rstrip()
        assert console.measure(text).maximum <= max(1, columns - 1), f"{columns} columns"


def test_only_the_recent_interval_counts_for_the_rate():
    rate = RecentRate()
    for second in range(101):
        rate.record(second, 5 * min(second, 50) + 100 * max(0, second - 50))
    assert rate.per_second == pytest.approx(100)


@pytest.mark.parametrize(
    ("method", "limit", "name"),
    [("validate", "val", "validation"), ("test", "test", "test"), ("predict", "predict", "prediction")],
)
def test_an_evaluation_ends_with_a_full_bar_or_prints_a_line_for_each_batch(method, limit, name, capsys):
    def evaluate(callback):
        settings = {**SILENT, "enable_progress_bar": True, f"limit_{limit}_batches": 2}
        getattr(Trainer(callbacks=[callback], **settings), method)(BoringModel())

    stream = io.StringIO()
    evaluate(BarProgress(Console(width=80, force_terminal=True, file=stream)))
    reconfigure()
    assert re.search(rf"{name}  ━+  batch 2/2", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()))
    capsys.readouterr()
    evaluate(PlainProgress(interval_seconds=0, clock=lambda: 0.0))
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if " batch " in line]
    assert lines == [f"{name} batch 1/2", f"{name} batch 2/2"]


@pytest.mark.parametrize("kind", [BarProgress, PlainProgress])
def test_a_module_may_print_beside_the_progress(kind, capsys):
    class Prints(BoringModel):
        def training_step(self, batch, batch_idx):
            self.print(f"printed in step {self.global_step}")
            return super().training_step(batch, batch_idx)

    train_in_process(kind(), model=Prints(), loops=True, enable_progress_bar=True, max_steps=1)
    assert "printed in step 0" in capsys.readouterr().out
