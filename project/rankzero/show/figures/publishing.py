"""Writes figures to the run directory and to loggers."""

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from PIL import Image

from rankzero.checkpoints.atomic_files import replacing, synced
from rankzero.runs.directory import RunDirectory
from rankzero.show.figures.class_counts import THRESHOLDS, Curve
from rankzero.show.figures.collection import tags_of
from rankzero.show.measurements.exchange import PREFIX
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger

FOLDER = "figures"


class Publisher:
    """Writes figures of a run; only rank zero uses it."""

    def __init__(
        self, run: RunDirectory, trainer: Trainer, logger: DurableTensorBoardLogger | None, log_system: bool
    ) -> None:
        self.run, self.trainer, self.logger, self.log_system = run, trainer, logger, log_system
        self._has_warned = False

    @property
    def step(self) -> int:
        """The step at which Lightning logs values now."""
        return int(self.trainer.fit_loop.epoch_loop.steps_done)  # type: ignore[attr-defined]

    def publish(self, name: str, content: bytes) -> None:
        """Writes a figure to `figures/<name>.png`, and logs it as `visuals/<name>`."""
        self._write(name, content)
        tag, step = f"visuals/{name}", self.step
        if self.logger:
            self.logger.log_with(_image_adder(tag, content, step))
        for logger in self.trainer.loggers if self.log_system else ():
            if callable(log_image := getattr(logger, "log_image", None)):  # Lightning's WandbLogger
                log_image(f"{PREFIX}{tag}", [Image.open(io.BytesIO(content))])

    def publish_curves(self, names: Sequence[str], curves: Sequence[Curve]) -> None:
        """Logs precision-recall curves for TensorBoard's page of that name."""
        step = self.step
        for tag, curve in zip(tags_of(names), curves, strict=True):
            if self.logger:
                self.logger.log_with(_curve_adder(f"pr_curves/{tag}", curve, step))

    def _write(self, name: str, content: bytes) -> None:
        if self.run.is_taken_over:
            return
        try:
            with (
                replacing(self.run.path / FOLDER / f"{name}.png", f".{os.getpid()}") as temporary,
                synced(temporary) as file,
            ):
                file.write(content)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"rankzero: {FOLDER}/{name}.png cannot be written, and training continues: {error}")


def _image_adder(tag: str, content: bytes, step: int) -> Callable[[Any], object]:
    """Returns a function that adds a PNG file; `SummaryWriter.add_image` would compress its pixels again."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = Image.open(io.BytesIO(content)).size
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=content)
    summary = Summary(value=[Summary.Value(tag=tag, image=image)])
    return lambda writer: writer.file_writer.add_summary(summary, step)


def _curve_adder(tag: str, curve: Curve, step: int) -> Callable[[Any], object]:
    counts = (curve.true_positives, curve.false_positives, curve.true_negatives, curve.false_negatives)
    arrays = [values.numpy() for values in (*counts, curve.precision, curve.recall)]
    return lambda writer: writer.add_pr_curve_raw(tag, *arrays, global_step=step, num_thresholds=THRESHOLDS)
