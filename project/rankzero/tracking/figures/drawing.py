"""Draws and publishes all figures of a run. Imports matplotlib, so it is imported when a figure is drawn."""

import math
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from rankzero.runs.reports.text import shortened
from rankzero.tracking.figures.charts import draw_accuracy, draw_confusion, draw_pairs, draw_precision_recall, png
from rankzero.tracking.figures.collection import Validation, WorstSample, downscaled
from rankzero.tracking.figures.publishing import Publisher

MAX_COLUMNS = 8
_CELL_INCHES, _GAP_INCHES, _LINE_INCHES, _TITLE_INCHES = 1.6, 0.14, 0.145, 0.4
_MAX_NAME = 20
"""Columns of a class name below an image."""


def draw_inputs(publisher: Publisher, images: Tensor, labels: Sequence[int], names: Sequence[str]) -> None:
    """Publishes images of a training batch."""
    texts = [shortened(_name(label, names), _MAX_NAME) for label in labels]
    title = f"Training inputs as the model receives them ({images.shape[2]} x {images.shape[3]} pixels)"
    publisher.publish("training_inputs", png(draw_grid(title, downscaled(images), texts)))


def draw_validation(publisher: Publisher, validation: Validation, names: Sequence[str]) -> None:
    """Publishes all figures of a validation."""
    if validation.pairs is not None:
        publisher.publish("predicted_and_true", png(draw_pairs(validation.pairs)))
    counts = validation.counts
    if counts is None or not int(counts.samples.sum()):
        return
    if validation.worst:
        publisher.publish("most_wrong", png(draw_worst(validation.worst, names)))
    if counts.matrix.numel():
        publisher.publish("confusion_matrix", png(draw_confusion(counts.matrix, names)))
    publisher.publish("accuracy_by_class", png(draw_accuracy(counts.samples, counts.correct, names)))
    curves, micro_average = counts.curves, counts.micro_average
    publisher.publish("precision_recall", png(draw_precision_recall(curves, micro_average, names)))
    publisher.publish_curves([*names[: len(curves)], "micro average"], [*curves, micro_average])


def draw_worst(samples: Sequence[WorstSample], names: Sequence[str]) -> Figure:
    """Draws the samples with the largest losses, with their true and predicted classes."""
    texts = [
        f"true: {shortened(_name(sample.true, names), _MAX_NAME)}\n"
        f"predicted: {shortened(_name(sample.predicted, names), _MAX_NAME - 5)}\n"
        f"loss {sample.loss:.3g}"
        for sample in samples
    ]
    title = "Validation samples with the largest losses"
    return draw_grid(title, torch.stack([s.image for s in samples]), texts)


def draw_grid(title: str, images: Tensor, labels: Sequence[str]) -> Figure:
    """Draws images in rows.

    Args:
        title: Title of the figure.
        images: Images of shape `(count, 1 or 3, height, width)`; the values of each image are scaled to 0..1.
        labels: Text below each image, of a few short lines; none without labels.
    """
    count, _, height, width = images.shape
    columns = min(count, MAX_COLUMNS, max(2, math.ceil(math.sqrt(count * height / width))))
    rows = -(-count // columns)
    lines = max((label.count("\n") + 1 for label in labels), default=0)
    image_height = _CELL_INCHES * min(max(height / width, 0.25), 4.0)
    cell_height = image_height + _LINE_INCHES * lines + _GAP_INCHES
    total_width, total_height = columns * (_CELL_INCHES + _GAP_INCHES), _TITLE_INCHES + rows * cell_height
    figure = Figure(figsize=(total_width, total_height))
    axes = figure.add_axes((0, 0, 1, 1))  # coordinates are inches; one axis per image would take a second to draw
    axes.set_axis_off()
    axes.text(total_width / 2, _TITLE_INCHES / 2, title, ha="center", va="center", fontsize=11)
    for number in range(count):
        left = number % columns * (_CELL_INCHES + _GAP_INCHES) + _GAP_INCHES / 2
        top = number // columns * cell_height + _TITLE_INCHES
        pixels = scaled(images[number]).expand(3, height, width).permute(1, 2, 0).numpy()
        axes.imshow(pixels, extent=(left, left + _CELL_INCHES, top + image_height, top), interpolation="nearest")
        if number < len(labels):
            place = left + _CELL_INCHES / 2, top + image_height + 0.03
            axes.text(*place, labels[number], ha="center", va="top", fontsize=8)
    axes.set_xlim(0, total_width)
    axes.set_ylim(total_height, 0)
    axes.set_aspect("auto")
    return figure


def scaled(image: Tensor) -> Tensor:
    """Returns an image with values from 0 to 1; zeros if all values are equal."""
    least, largest = image.aminmax()
    return (image - least) / (largest - least).clamp(min=1e-12)


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if 0 <= label < len(names) else str(label)
