"""Which metric of a run matters most, and whether small or large values are better. Does not import torch."""

import re
from collections.abc import Iterable

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
    """Returns `max` or `min`, depending on which values of a metric are better; None if unknown.

    Args:
        name: Name of the metric.
        kept_best: Direction and metric of `--keep_best`.
    """
    if kept_best is not None and kept_best[1] == name:
        return kept_best[0]
    words = _words(name)
    if not _SMALLER.isdisjoint(words):
        return "min"
    return None if _LARGER.isdisjoint(words) else "max"


def main_metric(names: Iterable[str], kept_best: tuple[str, str] | None = None) -> str | None:
    """Returns the metric that matters most: that of `--keep_best`, else accuracy or loss on validation data, else any.

    Args:
        names: Names of the metrics of a run.
        kept_best: Direction and metric of `--keep_best`.
    """
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
