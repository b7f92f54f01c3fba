"""Metrics for display, each of them once, and which of them matters most. Does not import torch."""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from rich.cells import cell_len

from rankzero.messages import printable_line
from rankzero.runs.reports.text import number_text

_VALIDATION = frozenset({"val", "valid", "validation", "dev", "eval"})
_TEST = frozenset({"test"})
_LARGER = frozenset(
    {"acc", "accuracy", "top1", "top5", "f1", "auc", "auroc", "map", "precision", "recall", "iou", "miou", "dice"}
    | {"bleu", "rouge", "r2", "psnr", "ssim", "score", "reward", "accuracy_top1", "mcc", "kappa"}
)
_SMALLER = frozenset(
    {"loss", "nll", "ce", "mse", "rmse", "mae", "mape", "error", "err", "perplexity", "ppl", "bpb", "wer", "cer"}
    | {"fid", "elbo_loss", "kl"}
)

_MEASUREMENT = re.compile(
    r"(x_axis|wall_time|workload|weights|world)/.*|train/(samples_per_second|lr(-\d+)?)|epoch|hp_metric"
)
"""Series of Rankzero and Lightning."""


def is_validation(name: str) -> bool:
    """Returns whether a metric was computed on validation data, as far as its name shows."""
    return not _VALIDATION.isdisjoint(_words(name))


def is_training_loss(name: str) -> bool:
    """Returns whether a metric is a loss on training data, as far as its name shows."""
    return "loss" in _words(name) and _VALIDATION.isdisjoint(_words(name)) and _TEST.isdisjoint(_words(name))


def is_measurement(name: str) -> bool:
    """Returns whether Rankzero or Lightning logs this series for every model; all others are metrics of the model."""
    return _MEASUREMENT.fullmatch(name) is not None


def direction(name: str, kept_best: tuple[str, str] | None = None) -> str | None:
    """Returns `max` or `min`, depending on which values of a metric are better; None if unknown."""
    if kept_best is not None and kept_best[1] == name:
        return kept_best[0]
    words = _words(name)
    if not _SMALLER.isdisjoint(words):
        return "min"
    return None if _LARGER.isdisjoint(words) else "max"


def main_metric(names: Iterable[str], kept_best: tuple[str, str] | None = None) -> str | None:
    """Returns the metric that matters most: that of `--keep_best`, else accuracy or loss of validation, else any."""
    candidates = sorted(name for name in names if not is_measurement(name))
    if kept_best is not None and kept_best[1] in candidates:
        return kept_best[1]
    ranked = sorted(candidates, key=_rank)
    return ranked[0] if ranked else None


def _rank(name: str) -> tuple[bool, int, int]:
    kind = {"max": 0, "min": 1, None: 2}[direction(name)]
    if kind == 1 and "loss" not in _words(name):
        kind = 2
    return not is_validation(name), kind, len(name)


def _words(name: str) -> set[str]:
    """Returns the words of a metric's name in lower case: `valAcc_epoch` has the words `val`, `acc` and `epoch`."""
    with_breaks = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return set(re.split(r"[^a-z0-9]+", with_breaks.lower()))


LINE_COLUMNS = 120
"""Maximum length of a line of output."""

_PARTS = re.compile(r"(?P<base>.+)_(?P<kind>step|epoch)(?P<loader>/dataloader_idx_\d+)?")
_LOADER = re.compile(r"(/dataloader_idx_\d+)?$")


def nan_for_none(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the metrics of a summary with NaN in place of None, which marks a non-finite value."""
    return {name: math.nan if value is None else float(value) for name, value in metrics.items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of a Trainer's metrics that are numbers: users may add anything to `callback_metrics`."""
    found = {}
    for name, value in metrics.items():
        with suppress(TypeError, ValueError, RuntimeError):  # a text, or a tensor with several elements
            found[str(name)] = float(value)
    return found


def unique_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns each metric once, with its epoch value if it has one.

    Lightning (2.6) stores a metric that is logged with `on_step=True, on_epoch=True` under three names: `loss_step`,
    `loss_epoch`, and `loss`, which equals one of the other two.
    """
    shown = {}
    for name, value in metrics.items():
        parts = _PARTS.fullmatch(name)
        if (
            parts
            and (base_name := parts["base"] + (parts["loader"] or "")) in metrics
            and _is_forked(base_name, metrics)
        ):
            continue
        shown[name] = metrics.get(_variant(name, "epoch"), value) if _is_forked(name, metrics) else value
    return shown


def metrics_line(
    head: str,
    metrics: Mapping[str, float],
    preferred: Iterable[str],
    tail: str,
    separator: str = "  ",
) -> str:
    """Returns a line of at most `LINE_COLUMNS` columns with as many metrics as fit, those in `preferred` first."""
    shown, preferred_names = unique_metrics(metrics), [name for name in preferred if name in metrics]
    names = sorted(shown, key=lambda name: (name not in preferred_names, name))
    available_columns = LINE_COLUMNS - cell_len(head) - cell_len(tail) - 2 * len(separator)
    pieces: list[str] = []
    for number, name in enumerate(names):
        piece = f"{printable_line(name)} {number_text(shown[name])}"
        omitted = len(names) - number - 1
        omission = f"+{omitted} more" if omitted else ""
        if cell_len(separator.join([*pieces, piece, *filter(None, [omission])])) > available_columns:
            pieces.append(f"+{omitted + 1} more")
            break
        pieces.append(piece)
    return separator.join([head, *pieces, tail])


def _is_forked(name: str, metrics: Mapping[str, float]) -> bool:
    """Returns whether Lightning stores a metric under variant names too: with `_step` and, after an epoch, `_epoch`."""
    step, epoch = metrics.get(_variant(name, "step")), metrics.get(_variant(name, "epoch"))
    return step is not None and (epoch is not None or step == metrics[name])


def _variant(name: str, kind: str) -> str:
    """Returns the name of a metric's variant: `loss/dataloader_idx_0` -> `loss_step/dataloader_idx_0`."""
    return _LOADER.sub(lambda loader: f"_{kind}{loader[0]}", name, count=1)
