"""Metrics for display, each of them once. Does not import torch."""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from rich.cells import cell_len

from rankzero.messages import printable_line
from rankzero.runs.reports.text import number_text

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
