"""Progress bar in a terminal: one line, however narrow the terminal is."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn
from rich.text import Text

from rankzero.distributed.devices import HostCopy
from rankzero.messages import encodable, printable_line
from rankzero.runs.reports.text import numbers, rough_duration, unique_metrics
from rankzero.tracking.progress.fit_progress import (
    EvaluationProgress,
    FitProgress,
    batch_text,
    batches_text,
    epoch_text,
    evaluation_batches,
    evaluation_label,
    rate_text,
)
from rankzero.training.hooks import TICK_SECONDS
from rankzero.training.metrics.epoch_averages import unread_progress_bar_metrics

SEPARATOR = "  "
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 30


@dataclass(frozen=True)
class Part:
    """One part of a line.

    Attributes:
        text: The text; empty for the bar.
        importance: Parts with larger numbers are left out first.
        style: Style of the text, as rich defines it.
    """

    text: str
    importance: int
    style: str = ""


def fitting(parts: Sequence[Part], columns: int) -> list[Part]:
    """Returns the parts that fit into a line, in their order; important parts take precedence over earlier ones."""
    chosen: set[int] = set()
    used = 0
    for number in sorted(range(len(parts)), key=lambda number: parts[number].importance):
        needed = (cell_len(parts[number].text) or MIN_BAR_COLUMNS) + len(SEPARATOR) * bool(chosen)
        if used + needed <= columns or not chosen:
            chosen.add(number)
            used += needed
    return [part for number, part in enumerate(parts) if number in chosen]


@dataclass
class Line:
    """A line for a terminal, which is at most as wide as the terminal.

    Attributes:
        parts: The parts in their order.
        fraction: Filled fraction of the bar; None for an unknown total, which leaves the bar out.
        bar_style: Style of the filled part of the bar.
    """

    parts: Sequence[Part] = ()
    fraction: float | None = None
    bar_style: str = ""

    def text(self, console: Console, options: ConsoleOptions) -> Text:
        """Returns the line for a terminal; its last column stays free, because some terminals wrap after it."""
        columns = max(1, options.max_width - 1)
        candidates = [part for part in self.parts if part.text or self.fraction is not None]
        parts = fitting(candidates, columns)
        used = sum(cell_len(part.text) for part in parts) + len(SEPARATOR) * (len(parts) - 1)
        bar_columns = min(columns - used, MAX_BAR_COLUMNS)
        pieces = [
            Text(part.text, part.style) if part.text else self._bar(bar_columns, console, options) for part in parts
        ]
        overflow: Literal["crop", "ellipsis"] = "crop" if options.ascii_only else "ellipsis"
        line = Text(SEPARATOR, no_wrap=True, overflow=overflow, end="").join(pieces)
        line.truncate(columns, overflow=overflow)
        return line

    def _bar(self, columns: int, console: Console, options: ConsoleOptions) -> Text:
        filled = round(min(1.0, max(0.0, self.fraction or 0.0)) * columns)
        character = "-" if options.ascii_only else "━"
        has_colors = console.color_system is not None and not console.no_color
        rest = (character if has_colors else " ") * (columns - filled)
        return Text.assemble((character * filled, self.bar_style), (rest, "bar.back"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text(console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = self.text(console, options).cell_len
        return Measurement(columns, columns)


class LineColumn(ProgressColumn):
    """The only column of a progress bar: it shows the line that was last set for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, Line] = {}

    def render(self, task: Any) -> Line:
        return self.lines.get(task.id, Line())


REDRAW_SECONDS = 0.25
"""Minimum time between two lines. A line costs half a millisecond, since it reads all metrics."""

EVENT_SECONDS = 1.0
"""Minimum time between two lines that are drawn earlier, because an epoch begins or a validation ends."""

LABEL, TIME_LEFT, BAR, STEP, METRIC, SPEED, MORE_METRICS, BATCH = range(8)
"""Parts of the line, the most important first."""


class BarProgress(EvaluationProgress, RichProgressBar):
    """Bar with epoch, step, metrics, training speed and time left, which replaces the content of Lightning's bar.

    The line shows the metrics that are logged with `prog_bar=True` as Lightning's bar does, then all others. It is
    redrawn every `REDRAW_SECONDS`. In an epoch on a GPU, it shows the metrics of the line before: reading the current
    ones would wait for the GPU.
    """

    on_train_batch_end = Callback.on_train_batch_end

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        if not arguments:
            settings = {"refresh_rate": round(1 / TICK_SECONDS), **settings}
        super().__init__(*arguments, **settings)
        self._fit: FitProgress | None = None
        self._column = LineColumn()
        self._metrics: list[Part] = []
        self._copies: tuple[HostCopy, ...] = ()
        self._reads_late = False
        self._batches, self._epoch = 0, ""
        self._next_line = self._next_event = 0.0

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        return [self._column]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit = None if self.is_disabled else FitProgress(trainer)
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.begin_epoch()
        self._batches, self._epoch = 0, epoch_text(trainer)
        super().on_train_epoch_start(trainer, pl_module)
        self._draw_event(trainer, pl_module)

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.tick()
            self._batches, self._epoch = batch_idx + 1, epoch_text(trainer)
            if time.monotonic() >= self._next_line:
                self._reads_late = True
                super().on_train_batch_end(trainer, trainer.lightning_module, None, batch, batch_idx)
                self._reads_late = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next_line = 0.0
        self._update_metrics(trainer, pl_module)
        self._metrics = []
        self._fit = None  # a test or prediction that follows has other numbers

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and trainer.state.fn is TrainerFn.FITTING:
            self._fit.begin_validation()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking:
            if self._fit is not None:
                self._fit.end_validation()
            self._remove(self.val_progress_bar_id)
            self.val_progress_bar_id = None
            self._set_visible(self.train_progress_bar_id, True)
            self._draw_event(trainer, pl_module)
        self.reset_dataloader_idx_tracker()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        previous = self.val_progress_bar_id
        super().on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
        if self.val_progress_bar_id != previous and not trainer.sanity_checking:
            self._remove(previous)
            self.show_evaluation(trainer, 0, dataloader_idx)

    def _init_progress(self, trainer: Trainer) -> None:
        previous = self.progress
        super()._init_progress(trainer)
        if self.progress is not None and self.progress is not previous and self._column in self.progress.columns:
            self._column.lines.clear()
            self.progress.columns = (self._column,)

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the line of the training; Lightning's class calls this method after batches, validations and epochs."""
        task = self.train_progress_bar_id
        now = time.monotonic()
        if self.is_disabled or task is None or self._fit is None or now < self._next_line:
            return
        self._next_line = now + REDRAW_SECONDS
        self._metrics = self._read_metrics(trainer)
        batches, total = self._batches, trainer.num_training_batches
        self._column.lines[task] = self._line(
            [Part(self._epoch, LABEL), Part("", BAR), Part(f"step {trainer.global_step}", STEP)],
            [Part(batch_text(batches, total), BATCH, self._style("time"))],
            self._fraction(trainer, batches, total),
        )

    def show_evaluation(self, trainer: Trainer, batches: int, loader: int) -> None:
        """Sets the line of a validation, a test or a prediction."""
        task, totals = self._evaluation_task(trainer), evaluation_batches(trainer)
        if self.is_disabled or task is None or self.progress is None:
            return
        total, now = totals[loader], time.monotonic()
        is_result = batches == total and trainer.state.fn is not TrainerFn.FITTING
        if now < self._next_line and not is_result:
            return
        self._next_line = now + REDRAW_SECONDS
        fraction = batches / total if isfinite(total) and total else None
        texts = Part(evaluation_label(trainer), LABEL), Part(batches_text(batches, totals, loader), STEP)
        self._column.lines[task] = self._line([texts[0], Part("", BAR), texts[1]], [], fraction)
        self._set_visible(self.train_progress_bar_id, False)
        self._update(task, batches)

    def _evaluation_task(self, trainer: Trainer) -> Any:
        if trainer.sanity_checking:
            return self.val_sanity_progress_bar_id
        if trainer.state.fn is TrainerFn.TESTING:
            return self.test_progress_bar_id
        return self.predict_progress_bar_id if trainer.state.fn is TrainerFn.PREDICTING else self.val_progress_bar_id

    def _draw_event(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the line without waiting for the next batch, but not in each of many short epochs."""
        if (now := time.monotonic()) >= self._next_event:
            self._next_event, self._next_line = now + EVENT_SECONDS, 0.0
        self._update_metrics(trainer, pl_module)
        self.refresh()

    def _line(self, first: list[Part], last: list[Part], fraction: float | None) -> Line:
        """Returns a line with the metrics between the first and the last parts, then speed and time left."""
        ends = []
        if self._fit is not None:
            if (rate := self._fit.samples_per_second) is not None:
                ends.append(Part(rate_text(rate), SPEED, self._style("time")))
            if (seconds := self._fit.seconds_left) is not None:
                ends.append(Part(f"{rough_duration(seconds)} left", TIME_LEFT, self._style("time")))
        return Line([*first, *self._metrics, *last, *ends], fraction, self._style("progress_bar"))

    def _style(self, name: str) -> str:
        return str(getattr(self.theme, name))

    def _read_metrics(self, trainer: Trainer) -> list[Part]:
        """Returns the metrics as parts of a line: those of the bar as in Lightning's class, then the others."""
        values = unread_progress_bar_metrics(trainer), trainer.callback_metrics
        begun = tuple(map(HostCopy, values))
        reads_earlier = self._reads_late and self._copies and not begun[1].is_complete
        bar_copy, other_copy = self._copies if reads_earlier else begun
        self._copies = begun
        shown = bar_copy.wait()
        others = unique_metrics(numbers(other_copy.wait()))
        metrics = {**shown, **{name: value for name, value in others.items() if not _is_shown(name, shown)}}
        important = important_names(list(metrics))
        return [
            Part(self._metric_text(name, value), METRIC if name in important else MORE_METRICS, self._style("metrics"))
            for name, value in metrics.items()
        ]

    def _metric_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            try:
                value = f"{value:{self.theme.metrics_format}}"
            except (TypeError, ValueError):
                value = str(value)
        return encodable(printable_line(f"{name}: {value}"))

    def _fraction(self, trainer: Trainer, batches: int, total: float) -> float | None:
        """Returns the fraction of the epoch, or of `max_steps` if the length of the epoch is unknown."""
        if isfinite(total) and total:
            return batches / total
        return trainer.global_step / trainer.max_steps if trainer.max_steps > 0 else None

    def _remove(self, task: Any) -> None:
        """Removes a validation that has ended; Lightning's class (2.6) would keep each one until the end of the run."""
        if self.progress is not None and task is not None and task in self.progress.task_ids:
            self.progress.remove_task(task)
            self._column.lines.pop(task, None)

    def _set_visible(self, task: Any, visible: bool) -> None:
        if self.progress is not None and task is not None:
            self.progress.update(task, visible=visible)


def _is_shown(name: str, shown: Mapping[str, Any]) -> bool:
    """Returns whether a metric is shown, under its own name or as the value of a step or an epoch."""
    return any(candidate in shown for candidate in (name, f"{name}_step", f"{name}_epoch"))


def important_names(names: Sequence[str]) -> list[str]:
    """Returns up to two names: the first, and the first that measures something else.

    For `train/loss`, `val/loss`, `val/accuracy` these are `train/loss` and `val/accuracy`.
    """
    first = names[:1]
    others = [name for name in names[1:] if name.rpartition("/")[2] != first[0].rpartition("/")[2]]
    return [*first, *(others or names[1:])[:1]]
