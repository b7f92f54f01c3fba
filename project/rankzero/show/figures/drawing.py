"""Draws and publishes all figures of a run. Imports matplotlib, so it is imported when a figure is drawn."""

import io
import math
import warnings
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import Tensor

from rankzero.show.figures.callback import RunFigures
from rankzero.show.figures.class_counts import Curve
from rankzero.show.figures.collection import Pairs, Validation, WorstSample, downscaled
from rankzero.show.report.curves import BRIGHT_COLORS
from rankzero.text import distinct, shortened

STYLES = ("-", "--", ":")
COLOR_MAP = "Blues"
"""Color map of one hue whose lightness decreases steadily, so that it can be read with any color vision."""


def png(figure: Figure) -> bytes:
    """Returns the figure as a PNG file; texts are shown as they are, also `$` of class names."""
    buffer = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name may be in any script
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


MAX_CONFUSED = 30
"""Number of classes in a confusion matrix."""

MAX_BARS = 50
MAX_NAME = 22
"""Columns of a class name in a chart."""

_MAX_COUNTED = 20
"""Largest number of classes for which the confusion matrix shows counts."""


def draw_confusion(matrix: Tensor, names: Sequence[str]) -> Figure:
    """Draws a confusion matrix whose rows are normalized; of many classes, those with the most errors."""
    shown = most_confused(matrix)
    count = len(shown)
    part = matrix[shown][:, shown]
    fractions = part / matrix.sum(1)[shown, None].clamp(min=1)
    side = max(3.0, 0.62 * count if count <= _MAX_COUNTED else 0.26 * count)
    figure = Figure(figsize=(side + 2.4, side + 1.6))
    axes = figure.add_subplot()
    image = axes.imshow(fractions.numpy(), cmap=COLOR_MAP, vmin=0, vmax=1)
    labels = distinct([names[index] for index in shown.tolist()], MAX_NAME, shown.tolist())
    size = 9 if count <= _MAX_COUNTED else 8
    is_flat = count <= 12 and max(map(len, labels)) <= 4
    axes.set_xticks(range(count), labels, rotation=0 if is_flat else 90, fontsize=size)
    axes.set_yticks(range(count), labels, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    all_classes = len(matrix)
    which = f", {count} of {all_classes:,} classes with most errors" if count < all_classes else ""
    axes.set_title(f"Confusion matrix{which}\n{int(matrix.sum()):,} validation samples", fontsize=11)
    if count <= _MAX_COUNTED:
        for row, column in torch.nonzero(part).tolist():
            color = "white" if fractions[row, column] > 0.5 else "black"  # the color map is dark from 0.5 on
            number = f"{int(part[row, column]):,}"
            text_size = 9 if len(number) <= 5 else 7
            axes.text(column, row, number, ha="center", va="center", color=color, fontsize=text_size)
    figure.colorbar(image, ax=axes, label="fraction of the samples of the true class", shrink=0.8)
    return figure


def most_confused(matrix: Tensor) -> Tensor:
    """Returns the indices of at most `MAX_CONFUSED` classes: those with the most errors, in ascending order."""
    errors = matrix.clone().fill_diagonal_(0)
    if len(matrix) <= MAX_CONFUSED:
        return torch.arange(len(matrix))
    order = (errors.sum(0) + errors.sum(1)).argsort(descending=True, stable=True)
    return order[:MAX_CONFUSED].sort().values


def draw_accuracy(samples: Tensor, correct: Tensor, names: Sequence[str]) -> Figure:
    """Draws the accuracy of each class as bars; of many classes, those with the lowest accuracy."""
    present = torch.nonzero(samples).flatten()
    accuracies = correct[present] / samples[present]
    order = accuracies.argsort(stable=True)[:MAX_BARS]
    count = len(order)
    figure = Figure(figsize=(5.6, 1.3 + 0.24 * max(count, 4)))
    axes = figure.add_subplot()
    values = accuracies[order].tolist()
    axes.barh(range(count), values, color=BRIGHT_COLORS[0], height=0.72)
    classes = present[order].tolist()
    labels = distinct([names[index] for index in classes], MAX_NAME + 6, classes)
    axes.set_yticks(range(count), labels, fontsize=9)
    for place, (value, index) in enumerate(zip(values, classes, strict=True)):
        axes.text(1.02, place, f"{value:.1%} of {int(samples[index]):,}", va="center", fontsize=8)
    mean = float(correct.sum() / samples.sum().clamp(min=1))
    axes.axvline(mean, color=BRIGHT_COLORS[1], linestyle="--", linewidth=1.5)
    which = f"{count} of {len(present):,} classes with the lowest accuracy" if count < len(present) else "all classes"
    axes.set_title(f"Accuracy: {which}\ndashed line: {mean:.1%} of all samples", fontsize=11)
    axes.set(xlabel="fraction of correct predictions", xlim=(0, 1), ylim=(count - 0.4, -0.6))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_precision_recall(curves: Sequence[Curve], micro_average: Curve, names: Sequence[str]) -> Figure:
    """Draws precision over recall, for each class and for all pairs of a sample and a class."""
    figure = Figure(figsize=(6.2, 5.0))
    axes = figure.add_subplot()
    for number, (curve, name) in enumerate(zip(curves, names, strict=False)):
        if curve.positives:
            repetition, index = divmod(number, len(BRIGHT_COLORS))
            color, style = BRIGHT_COLORS[index], STYLES[repetition % len(STYLES)]
            axes.plot(*_line(curve), label=_label(name, curve), linewidth=1.5, color=color, linestyle=style)
    axes.plot(*_line(micro_average), label=_label("all (micro average)", micro_average), color="black", linewidth=2.5)
    axes.set(xlabel="recall", ylabel="precision", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axes.set_title("Precision and recall", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    title = "average precision"
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, fontsize=9, frameon=False, title=title)
    return figure


def draw_pairs(pairs: Pairs) -> Figure:
    """Draws predicted values over true values, with the diagonal on which they are equal."""
    figure = Figure(figsize=(5.6, 5.4))
    axes = figure.add_subplot()
    is_finite = pairs.true.isfinite() & pairs.predicted.isfinite()
    true, predicted = pairs.true[is_finite], pairs.predicted[is_finite]
    if len(true):
        least, largest = (float(limit) for limit in torch.cat([true, predicted]).aminmax())
        margin = 0.03 * (largest - least) or 0.5 * abs(largest) or 0.5
        limits = least - margin, largest + margin
        axes.plot(limits, limits, color="black", linewidth=1.2, linestyle="--", label="predicted = true")
        size = 26 if len(true) <= 200 else 10
        axes.scatter(true.numpy(), predicted.numpy(), s=size, color=BRIGHT_COLORS[0], alpha=0.45, linewidths=0)
        axes.set(xlim=limits, ylim=limits)
        axes.legend(loc="upper left", fontsize=9)
    else:
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center")
    axes.set(xlabel="true value", ylabel="predicted value", aspect="equal")
    which = f"{len(true):,} of {pairs.total:,}" if len(true) < pairs.total else f"{pairs.total:,}"
    axes.set_title(f"Predicted and true values\n{which} validation values", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    return figure


def _line(curve: Curve) -> tuple[list[float], list[float]]:
    """Returns recall and precision at the thresholds that any sample reaches."""
    is_reached = curve.true_positives + curve.false_positives > 0
    return curve.recall[is_reached].tolist(), curve.precision[is_reached].tolist()


def _label(name: str, curve: Curve) -> str:
    """Returns a name after the mean precision over recall, by steps between the thresholds."""
    recall = curve.recall.flip(0)
    average_precision = float((recall.diff(prepend=recall.new_zeros(1)) * curve.precision.flip(0)).sum())
    return f"{average_precision:.3f}  {shortened(name, MAX_NAME)}"


MAX_COLUMNS = 8
_CELL_INCHES, _GAP_INCHES, _LINE_INCHES, _TITLE_INCHES = 1.6, 0.14, 0.145, 0.4
_MAX_NAME = 20
"""Columns of a class name below an image."""


def draw_inputs(figures: RunFigures, images: Tensor, labels: Sequence[int], names: Sequence[str]) -> None:
    """Publishes images of a training batch."""
    texts = [shortened(_name(label, names), _MAX_NAME) for label in labels]
    title = f"Training inputs as the model receives them ({images.shape[2]} x {images.shape[3]} pixels)"
    figures.publish("training_inputs", png(draw_grid(title, downscaled(images), texts)))


def draw_validation(figures: RunFigures, validation: Validation, names: Sequence[str]) -> None:
    """Publishes all figures of a validation."""
    if validation.pairs is not None:
        figures.publish("predicted_and_true", png(draw_pairs(validation.pairs)))
    counts = validation.counts
    if counts is None or not int(counts.samples.sum()):
        return
    if validation.worst:
        figures.publish("most_wrong", png(draw_worst(validation.worst, names)))
    if counts.matrix.numel():
        figures.publish("confusion_matrix", png(draw_confusion(counts.matrix, names)))
    figures.publish("accuracy_by_class", png(draw_accuracy(counts.samples, counts.correct, names)))
    curves, micro_average = counts.curves, counts.micro_average
    figures.publish("precision_recall", png(draw_precision_recall(curves, micro_average, names)))
    figures.publish_curves([*names[: len(curves)], "micro average"], [*curves, micro_average])


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
    """Draws images of shape `(count, 1 or 3, height, width)` in rows, with a short text below each if there are labels.

    The values of each image are scaled to 0..1.
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
    images = images - images.amin((1, 2, 3), keepdim=True)
    images = images / images.amax((1, 2, 3), keepdim=True).clamp(min=1e-12)
    for number in range(count):
        left = number % columns * (_CELL_INCHES + _GAP_INCHES) + _GAP_INCHES / 2
        top = number // columns * cell_height + _TITLE_INCHES
        pixels = images[number].expand(3, height, width).permute(1, 2, 0).numpy()
        axes.imshow(pixels, extent=(left, left + _CELL_INCHES, top + image_height, top), interpolation="nearest")
        if number < len(labels):
            place = left + _CELL_INCHES / 2, top + image_height + 0.03
            axes.text(*place, labels[number], ha="center", va="top", fontsize=8)
    axes.set(xlim=(0, total_width), ylim=(total_height, 0), aspect="auto")
    return figure


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if 0 <= label < len(names) else str(label)
