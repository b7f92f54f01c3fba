"""Draws images of a run: training inputs, and what a validation has predicted."""

import io
import math
import os
from collections.abc import Callable, Sequence
from operator import methodcaller
from time import monotonic
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image

from rankzero.checkpoints.atomic_files import replacing, synced
from rankzero.distributed.monitoring.activity import HOOK, VALIDATION, Activity
from rankzero.runs.directory import RunDirectory
from rankzero.show.figures import collection
from rankzero.show.figures.class_counts import THRESHOLDS, Curve
from rankzero.show.figures.collection import MAX_SAMPLES, Collection, CollectionError, Validation, class_names, tags_of
from rankzero.show.measurements.throughput import Throughput
from rankzero.show.report.curves import PREFIX
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import strategy_of
from rankzero.training.validations import ValidationSchedule

FOLDER = "figures"

PAUSE_FACTOR = 100.0
"""Shortest time between two drawings, in durations of a drawing: drawing takes at most 1 % of the time."""


class RunFigures(LoopCallback):
    """Draws figures for modules whose `validation_step` returns the documented names.

    An error never ends training: it is reported once, and no further figures are drawn in this attempt.
    """

    def __init__(
        self,
        run: RunDirectory,
        throughput: Throughput,
        activity: Activity,
        logger: DurableTensorBoardLogger | None = None,
        log_system: bool = False,
    ) -> None:
        self.run, self.throughput, self.activity = run, throughput, activity
        self.logger, self.log_system = logger, log_system
        self._is_enabled = self._draws_inputs = False
        self._has_failed = False
        """Whether drawing has failed; only on rank zero."""
        self._collection: Collection | None = None
        self._seconds = 0.0
        """Time spent in this callback since the start of the validation."""
        self._pause_ends = 0.0
        """Time from which on a validation that is not the last one is drawn."""

    def on_ready(self, trainer: Trainer) -> None:
        self._is_enabled = not (trainer.barebones or trainer.fast_dev_run)  # type: ignore[attr-defined]
        self._draws_inputs = self._is_enabled and trainer.is_global_zero
        self._trainer, self._has_warned = trainer, False

    def needs(self, hook: str) -> bool:
        return hook != "on_tick" or self._draws_inputs

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Draws the first batch of an attempt."""
        if self._draws_inputs:
            self._draws_inputs = False
            self._guarded(lambda: self._draw_inputs(trainer, batch))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decides whether to draw this validation. All ranks must call."""
        self._collection = None
        if not self._is_enabled or trainer.sanity_checking or trainer.state.fn is not TrainerFn.FITTING:
            return
        is_due = monotonic() >= self._pause_ends or is_last_validation(trainer)
        if strategy_of(trainer).broadcast(is_due and not self._has_failed):
            self._seconds = 0.0
            self._collection = Collection(trainer.world_size, trainer.global_rank)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._collection is not None and dataloader_idx == 0:
            began = monotonic()
            self._collection.add(outputs, batch)
            self._seconds += monotonic() - began

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the outputs of all ranks, if this validation is drawn. All ranks must call."""
        collected, self._collection = self._collection, None
        if collected is None:
            return
        try:
            validation = collected.exchange(strategy_of(trainer))
        except CollectionError as error:
            self._is_enabled = False
            _warn(error)
            return
        if validation is None:  # the module returns other outputs
            self._is_enabled = False
        elif trainer.is_global_zero:
            began = monotonic()
            self._guarded(lambda: self._draw(trainer, validation))
            ended = monotonic()
            self._pause_ends = ended + PAUSE_FACTOR * (self._seconds + ended - began)

    def _guarded(self, draw: Callable[[], None]) -> None:
        """Draws, without counting the time as training; an error disables figures in this attempt."""
        self.activity.enter(VALIDATION)
        try:
            with self.throughput.paused():
                draw()
        except Exception as error:
            self._has_failed = True
            _warn(error)
        finally:
            self.activity.enter(HOOK)

    def _draw_inputs(self, trainer: Trainer, batch: Any) -> None:
        images = collection.find_images(batch)
        if images is None:
            return
        from rankzero.show.figures import drawing

        classes = collection.find_classes(batch, len(images))
        labels = [] if classes is None else classes[:MAX_SAMPLES].tolist()
        drawing.draw_inputs(self, images[:MAX_SAMPLES].cpu(), labels, class_names(trainer, None))

    def _draw(self, trainer: Trainer, validation: Validation) -> None:
        from rankzero.show.figures import drawing

        names = class_names(trainer, validation.counts.classes if validation.counts else None)
        drawing.draw_validation(self, validation, names)

    @property
    def step(self) -> int:
        """The step at which Lightning logs values now."""
        return fit_loop_of(self._trainer).epoch_loop.steps_done

    def publish(self, name: str, content: bytes) -> None:
        """Writes a figure to `figures/<name>.png`, and logs it as `visuals/<name>`."""
        path, tag, step = self.run.path / FOLDER / f"{name}.png", f"visuals/{name}", self.step
        try:
            if not self.run.is_taken_over:
                with replacing(path, f".{os.getpid()}") as temporary, synced(temporary) as file:
                    file.write(content)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"rankzero: {FOLDER}/{name}.png cannot be written, and training continues: {error}")
        if self.logger:
            self.logger.log_with(_image_adder(tag, content, step))
        for logger in self._trainer.loggers if self.log_system else ():
            if callable(log_image := getattr(logger, "log_image", None)):  # Lightning's WandbLogger
                log_image(f"{PREFIX}{tag}", [Image.open(io.BytesIO(content))])

    def publish_curves(self, names: Sequence[str], curves: Sequence[Curve]) -> None:
        """Logs precision-recall curves for TensorBoard's page of that name."""
        if self.logger is None:
            return
        settings = {"global_step": self.step, "num_thresholds": THRESHOLDS}
        for tag, curve in zip(tags_of(names), curves, strict=True):
            counts = (curve.true_positives, curve.false_positives, curve.true_negatives, curve.false_negatives)
            arrays = [values.numpy() for values in (*counts, curve.precision, curve.recall)]
            self.logger.log_with(methodcaller("add_pr_curve_raw", f"pr_curves/{tag}", *arrays, **settings))


def _warn(error: Exception) -> None:
    text = str(error) if isinstance(error, CollectionError) else repr(error)
    rank_zero_warn(f"rankzero: no further figures are drawn in this attempt, and training continues: {text}")


def is_last_validation(trainer: Trainer) -> bool:
    """Returns whether no validation will follow the current one in this run, as far as is known (lightning 2.6)."""
    fit_loop, max_epochs, batches = fit_loop_of(trainer), trainer.max_epochs, trainer.num_training_batches
    loop, schedule = fit_loop.epoch_loop, ValidationSchedule.of(trainer)
    left_in_epoch = 0 if loop.batch_progress.is_last_batch else max(0, batches - loop.batches_done)
    remaining = math.inf
    if max_epochs not in (None, -1):
        later_epochs = max_epochs - 1 - trainer.current_epoch
        remaining = left_in_epoch + (later_epochs * batches if later_epochs > 0 else 0)
    if trainer.max_steps != -1:
        steps = max(0, trainer.max_steps - trainer.global_step)
        remaining = min(remaining, steps * trainer.accumulate_grad_batches)
    if remaining <= 0 or (trainer.should_stop and fit_loop.can_stop_early):
        return True
    if schedule.validation_interval in (None, math.inf) or remaining == math.inf:
        return False  # validations are due at intervals of time, or after unknown batches
    done = loop.batches_done
    earlier_batches = loop.batch_progress.total.processed - done  # type: ignore[attr-defined]
    return not schedule.count(trainer.current_epoch, earlier_batches, done, done + remaining)


def _image_adder(tag: str, content: bytes, step: int) -> Callable[[Any], object]:
    """Returns a function that adds a PNG file; `SummaryWriter.add_image` would compress its pixels again."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = Image.open(io.BytesIO(content)).size
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=content)
    summary = Summary(value=[Summary.Value(tag=tag, image=image)])
    return lambda writer: writer.file_writer.add_summary(summary, step)
