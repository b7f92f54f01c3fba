"""Short texts: names, numbers, durations, and the metrics that matter most, each once. Does not import torch."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.cells import cell_len

from rankzero.messages import printable_line

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_LARGE = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))

MISSING = "-"
"""Shown in place of a value that is not known."""

NOT_FINITE = "not finite"
"""Shown in place of NaN and infinity, which summaries do not distinguish."""


def shortened(text: str, width: int) -> str:
    """Returns the text in one line of at most `width` printable columns; removes the middle of a longer one."""
    text = printable_line(text)
    if cell_len(text) <= width:
        return text
    if width < 5:
        return _beginning(text, width)
    tail = _beginning(text[::-1], (width - 1) // 2)[::-1]
    return f"{_beginning(text, width - 1 - cell_len(tail))}…{tail}"


def distinct(texts: Sequence[str], width: int, numbers: Sequence[int] = ()) -> list[str]:
    """Returns texts shortened to `width` columns, with a number before each if two of them would be equal."""
    short = [shortened(text, width) for text in texts]
    if len(set(short)) == len(short):
        return short
    pairs = zip(numbers or range(1, len(texts) + 1), texts, strict=True)
    return [f"{number} {shortened(text, width - len(str(number)) - 1)}" for number, text in pairs]


def _beginning(text: str, width: int) -> str:
    """Returns as many characters as fit into `width` columns; some characters need two."""
    end = columns = 0
    while end < len(text) and (columns := columns + cell_len(text[end])) <= width:
        end += 1
    return text[:end]


def age(seconds: float) -> str:
    """Returns a duration in its largest unit, rounded down, such as `3 min`, `2 h` or `5 d`."""
    seconds = max(0.0, seconds)
    unit, size = next((entry for entry in _UNITS if seconds >= entry[1]), _UNITS[-1])
    return f"{int(seconds / size)} {unit}"


def duration(seconds: float | None) -> str:
    """Returns a measured duration in its two largest units, such as `12.5 s`, `5 min 10 s` or `2 h 5 min`."""
    if seconds is None:
        return MISSING
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def rough_duration(seconds: float) -> str:
    """Returns an estimated or changing duration as `45 s`, `12 min`, `2 h 05 min` or `3 d 04 h`."""
    if (whole_seconds := round(seconds)) < 60:
        return f"{whole_seconds} s"
    if (minutes := round(seconds / 60)) < 60:
        return f"{minutes} min"
    if (hours := minutes // 60) < 48:
        return f"{hours} h {minutes % 60:02} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def compact(number: float | None) -> str:
    """Returns a count in at most five characters, such as `460`, `12.3k` or `1.2M`."""
    if number is None:
        return MISSING
    if not math.isfinite(number):
        return "?"
    if number < 9999.5:
        return f"{number:.0f}" if number >= 9.95 or number == int(number) else f"{number:.1f}"
    suffix, size = next((entry for entry in _LARGE if number >= 0.99995 * entry[1]), _LARGE[-1])
    return f"{number / size:.0f}{suffix}" if number >= 99.95 * size else f"{number / size:.1f}{suffix}"


def number_text(value: float | None, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits, or with all its integer digits if it has more.

    With four digits, the results are such as `0.9877`, `3e-07` or `12,345`.
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return NOT_FINITE
    if 1000 <= abs(value) < 1e9:
        decimals = max(0, digits - len(f"{abs(value):.0f}"))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits}g}"


_VALIDATION = frozenset({"val", "valid", "validation", "dev", "eval"})
_LARGER = frozenset(
    {"acc", "accuracy", "top1", "top5", "f1", "auc", "auroc", "map", "precision", "recall", "iou", "miou", "dice"}
    | {"bleu", "rouge", "r2", "psnr", "ssim", "score", "reward", "accuracy_top1", "mcc", "kappa"}
)
_SMALLER = frozenset(
    {"loss", "nll", "ce", "mse", "rmse", "mae", "mape", "error", "err", "perplexity", "ppl", "bpb", "wer", "cer"}
    | {"fid", "elbo_loss", "kl"}
)

GROUPS = ("wall_time/", "workload/", "world/", "weights/", "x_axis/")
"""Beginnings of the tags that only Rankzero uses."""


def is_measurement(tag: str) -> bool:
    """Returns whether Rankzero or Lightning logs this series for every model; all others are metrics of the model."""
    known = ("epoch", "hp_metric", "train/samples_per_second")
    return tag.startswith(GROUPS) or tag in known or re.fullmatch(r"train/lr(-\d+)?", tag) is not None


def is_validation(name: str) -> bool:
    """Returns whether a metric was computed on validation data, as far as its name shows."""
    return not _VALIDATION.isdisjoint(_words(name))


def is_training_loss(name: str) -> bool:
    """Returns whether a metric is a loss on training data, as far as its name shows."""
    return "loss" in _words(name) and "test" not in _words(name) and not is_validation(name)


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
    return min(candidates, key=_rank, default=None)


def _rank(name: str) -> tuple[bool, int, int]:
    kind = 0 if direction(name) == "max" else 1 if "loss" in _words(name) else 2
    return not is_validation(name), kind, len(name)


def _words(name: str) -> set[str]:
    """Returns the words of a metric's name in lower case: `valAcc_epoch` has the words `val`, `acc` and `epoch`."""
    return set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


LINE_COLUMNS = 120
"""Maximum length of a line of output."""

_PARTS = re.compile(r"(?P<base>.+)_(?:step|epoch)(?P<loader>/dataloader_idx_\d+)?\Z")
_LOADER = re.compile(r"(/dataloader_idx_\d+)?$")


def nan_for_none(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the metrics of a summary with NaN in place of None, which marks a non-finite value."""
    return {name: math.nan if value is None else float(value) for name, value in metrics.items()}


def finite_or_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the metrics with None in place of NaN and infinity, which JSON cannot represent."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


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
        base_name = _PARTS.sub(r"\g<base>\g<loader>", name)
        if base_name != name and base_name in metrics and _is_forked(base_name, metrics):
            continue
        shown[name] = metrics.get(_variant(name, "epoch"), value) if _is_forked(name, metrics) else value
    return shown


def metrics_line(
    head: str, metrics: Mapping[str, float], preferred: Iterable[str], tail: str, separator: str = "  "
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
