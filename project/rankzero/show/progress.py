"""Displays of progress: one line in a terminal, however narrow it is, and lines for files, pipes and jobs."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rankzero.distributed.devices import HostCopy
from rankzero.messages import encodable, print_line, printable_line
from rankzero.show.fit_progress import RunProgress, batch_text, epoch_text, evaluation_label, rate_text
from rankzero.text import metrics_line, numbers, rough_duration, unique_metrics
from rankzero.training.metrics.epoch_averages import unread_progress_bar_metrics

INTERVAL_SECONDS = 10.0
"""Minimum time between two lines."""


class PlainProgress(RunProgress):
    """Prints lines at the end of epochs and during long epochs, at intervals that grow with the duration of the run.

    The ends of the first and the last epoch always get a line. A long validation, test or prediction gets lines too.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.interval_seconds = interval_seconds
        self._started_at = self._due_at = self._validation_due_at = 0.0
        self._is_first_epoch = True
        self._unprinted_epoch: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._validation_due_at = 0.0
        self._start()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._start()
        self._is_first_epoch, self._unprinted_epoch = True, None

    def show_batch(self, trainer: Trainer, batches: int) -> None:
        """Prints a line if one is due, but not at the end of an epoch, which gets a line of its own."""
        if self._is_due and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            text = batch_text(batches, trainer.num_training_batches)
            self._print(trainer, f"{epoch_text(trainer)} {text}  step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        head = f"{epoch_text(trainer)} done  step {trainer.global_step}"
        if self._is_first_epoch or self._is_due:
            self._print(trainer, head)
            head = ""
        self._is_first_epoch, self._unprinted_epoch = False, head or None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the end of the last epoch. Which epoch is the last, is known only now: limits and callbacks decide."""
        if self._unprinted_epoch is not None:
            self._print(trainer, self._unprinted_epoch, has_ended=True)
            self._unprinted_epoch = None
        super().on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._validation_due_at = self.clock() + self.interval_seconds

    def show_evaluation(self, trainer: Trainer, batches: int, total: float, text: str) -> None:
        """Prints a line of a validation, a test or a prediction if one is due, but none of a short validation."""
        if self._is_due and self.clock() >= self._validation_due_at:
            print_line(f"{evaluation_label(trainer)}{',' * trainer.sanity_checking} {text}  {self._times()}")

    @property
    def _is_due(self) -> bool:
        return self.enabled and self.clock() >= self._due_at

    def _start(self) -> None:
        self._started_at = self.clock()
        self._schedule_next()

    def _schedule_next(self) -> float:
        """Determines when the next line is due; returns the seconds since the start.

        The time between two lines is a tenth of those, at most 15 minutes, and after 12.5 hours 2 % of them. A run
        prints about 10 lines in 100 s, 35 in 15 minutes, 55 in two hours, 130 in a day and 300 in a month.
        """
        now = self.clock()
        elapsed = now - self._started_at
        self._due_at = now + max(self.interval_seconds, min(0.1 * elapsed, 900.0), 0.02 * elapsed)
        return elapsed

    def _print(self, trainer: Trainer, head: str, has_ended: bool = False) -> None:
        if not self.enabled:
            return
        rate = self._fit.samples_per_second if self._fit is not None else None
        tail = (f"{rate_text(rate)}  " if rate is not None else "") + self._times(has_ended)
        metrics = numbers(HostCopy(trainer.callback_metrics).wait())
        print_line(metrics_line(head, metrics, trainer.progress_bar_metrics, tail))

    def _times(self, has_ended: bool = False) -> str:
        """Returns the time since the start and the time left."""
        elapsed = self._schedule_next()
        text = f"{elapsed:.0f} s" if elapsed < 600 else rough_duration(elapsed)  # lines are 10 s apart at first
        seconds_left = self._fit.seconds_left if self._fit is not None and not has_ended else None
        return text if seconds_left is None else f"{text}, {rough_duration(seconds_left)} left"


SEPARATOR = "  "
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 30
BAR_STYLE, TIME_STYLE = "#6206E0", "dim"


@dataclass(frozen=True)
class Part:
    """A part of a line, empty for the bar; parts of larger importance are left out first."""

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
    """

    parts: Sequence[Part] = ()
    fraction: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(1, options.max_width - 1)  # some terminals wrap after their last column
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
        yield line

    def _bar(self, columns: int, console: Console, options: ConsoleOptions) -> Text:
        filled = round(min(1.0, max(0.0, self.fraction or 0.0)) * columns)
        character = "-" if options.ascii_only else "━"
        has_colors = console.color_system is not None and not console.no_color
        rest = (character if has_colors else " ") * (columns - filled)
        return Text.assemble((character * filled, BAR_STYLE), (rest, "bar.back"))


REDRAW_SECONDS = 0.25
"""Minimum time between two lines. A line costs half a millisecond, since it reads all metrics."""

EVENT_SECONDS = 1.0
"""Minimum time between two lines that are drawn earlier, because an epoch begins or a validation ends."""

LABEL, TIME_LEFT, BAR, STEP, METRIC, SPEED, MORE_METRICS, BATCH = range(8)
"""Parts of the line, the most important first."""


class BarProgress(RunProgress):
    """Bar with epoch, step, metrics, training speed and time left.

    The line shows the metrics that are logged with `prog_bar=True` as Lightning's bar does, then all others. It is
    redrawn every `REDRAW_SECONDS`. In an epoch on a GPU, it shows the metrics of the line before: reading the current
    ones would wait for the GPU.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console
        self._live: Live | None = None
        self._metrics: list[Part] = []
        self._copies: tuple[HostCopy, ...] = ()
        self._batches, self._epoch = 0, ""
        self._shows_evaluation = False
        self._next_line = self._next_event = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._batches, self._epoch = 0, epoch_text(trainer)
        self._show_event(trainer)

    def show_batch(self, trainer: Trainer, batches: int) -> None:
        self._batches, self._epoch = batches, epoch_text(trainer)
        self._show_fit(trainer, reads_late=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_fit(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._next_line = 0.0
        self._show_fit(trainer)
        self._metrics = []
        super().on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.show_loader(trainer, 0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._show_event(trainer)

    def _stop(self, *_: Any, **__: Any) -> None:
        """Leaves the last line in the terminal."""
        live, self._live, self._fit = self._live, None, None
        if live is not None:
            live.stop()

    teardown = on_exception = _stop

    def _show_event(self, trainer: Trainer) -> None:
        """Draws the line without waiting for the next batch, but not in each of many short epochs."""
        now = self.clock()
        if now >= self._next_event or self._shows_evaluation:
            self._next_event, self._next_line = now + EVENT_SECONDS, 0.0
        self._show_fit(trainer)

    def _show_fit(self, trainer: Trainer, reads_late: bool = False) -> None:
        """Draws the line of the training, if it is due."""
        if self._fit is None or self.clock() < self._next_line:
            return
        self._metrics = self._read_metrics(trainer, reads_late)
        self._shows_evaluation = False
        batches, total = self._batches, trainer.num_training_batches
        fraction = fraction_of(batches, total)
        if fraction is None and trainer.max_steps > 0:  # the length of the epoch is unknown
            fraction = trainer.global_step / trainer.max_steps
        first = [Part(self._epoch, LABEL), Part("", BAR), Part(f"step {trainer.global_step}", STEP)]
        self._draw(first, [Part(batch_text(batches, total), BATCH, TIME_STYLE)], fraction)

    def show_evaluation(self, trainer: Trainer, batches: int, total: float, text: str) -> None:
        is_result = batches == total and trainer.state.fn is not TrainerFn.FITTING
        if self.clock() >= self._next_line or is_result:
            self._shows_evaluation = True
            first = [Part(evaluation_label(trainer), LABEL), Part("", BAR), Part(text, STEP)]
            self._draw(first, [], fraction_of(batches, total))

    def _draw(self, first: list[Part], last: list[Part], fraction: float | None) -> None:
        """Draws a line with the metrics between the first and the last parts, then speed and time left."""
        ends = []
        if self._fit is not None:
            if (rate := self._fit.samples_per_second) is not None:
                ends.append(Part(rate_text(rate), SPEED, TIME_STYLE))
            if (seconds := self._fit.seconds_left) is not None:
                ends.append(Part(f"{rough_duration(seconds)} left", TIME_LEFT, TIME_STYLE))
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Line([*first, *self._metrics, *last, *ends], fraction), refresh=True)
        self._next_line = self.clock() + REDRAW_SECONDS

    def _read_metrics(self, trainer: Trainer, reads_late: bool) -> list[Part]:
        """Returns the metrics as parts of a line: those of the bar as in Lightning's class, then the others."""
        values = unread_progress_bar_metrics(trainer), trainer.callback_metrics
        begun = tuple(map(HostCopy, values))
        reads_earlier = reads_late and self._copies and not begun[1].is_complete
        bar_copy, other_copy = self._copies if reads_earlier else begun
        self._copies = begun
        shown = bar_copy.wait()
        others = unique_metrics(numbers(other_copy.wait()))
        metrics = {**shown, **{name: value for name, value in others.items() if not _is_shown(name, shown)}}
        important = important_names(list(metrics))
        return [
            Part(_metric_text(name, value), METRIC if name in important else MORE_METRICS, "italic")
            for name, value in metrics.items()
        ]


def fraction_of(batches: int, total: float) -> float | None:
    """Returns the filled fraction of the bar; None for an unknown total."""
    return batches / total if isfinite(total) and total else None


def _metric_text(name: str, value: Any) -> str:
    try:
        text = f"{value:.3f}"
    except (TypeError, ValueError):  # such as a text
        text = str(value)
    return encodable(printable_line(f"{name}: {text}"))


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


JOB_LAUNCHERS = ("flux", "mpi", "pbs", "slurm")
"""Launchers whose output is plain lines: it usually goes to a file, although mpirun provides a pseudo-terminal."""


def progress_callbacks(
    lightning_arguments: Mapping[str, Any], callbacks: Sequence[Callback], launcher: str
) -> list[Callback]:
    """Returns the progress callback of a Trainer; none if the user provides a progress bar or has disabled it."""
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if has_bar or lightning_arguments.get("barebones") or lightning_arguments.get("enable_progress_bar") is False:
        return []
    has_terminal = sys.stdout is not None and sys.stdout.isatty() and launcher not in JOB_LAUNCHERS
    return [BarProgress() if has_terminal else PlainProgress()]


def without_progress(lightning_arguments: Mapping[str, Any], callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Returns the arguments for Lightning's Trainer of a quiet run: no progress bar and no table of the model.

    A progress bar among the user's callbacks stays, and so does a table that the user has requested.
    """
    quiet = dict(lightning_arguments)
    if not any(isinstance(callback, ProgressBar) for callback in callbacks):
        quiet["enable_progress_bar"] = False
    if quiet.get("enable_model_summary") is None and not quiet.get("barebones"):
        quiet["enable_model_summary"] = False
    return quiet
