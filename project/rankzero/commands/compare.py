"""The command `compare`: prints how runs differ, and draws their curves. Does not import torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.cli.command_line import run_command
from rankzero.cli.flags import Flag, choice, file_path
from rankzero.messages import Exit, RequestError, print_error, print_line, printable_line, quoted, similar_names
from rankzero.runs.directory import expanded
from rankzero.runs.recorded_run import is_run
from rankzero.show import comparison
from rankzero.show.comparison import STEPS, X_AXES
from rankzero.show.run_list import root_flag, unknown_run_error

MAX_RUNS = 8
"""Number of runs whose curves a person can distinguish by color and style."""

FORMATS = (".png", ".svg", ".pdf")


def figure(text: str) -> str:
    """Reads the path of a figure; its suffix must be one of `FORMATS`."""
    if Path(file_path(text)).suffix.lower() not in FORMATS:
        raise ValueError("a file that ends in " + ", ".join(FORMATS))
    return text


METRIC_HELP = "draw only this metric; can be repeated [train loss and validation metrics]"

COMPARE_FLAGS = (
    Flag("root", "DIR", file_path, "folder of the runs [runs]", "runs", default="runs"),
    Flag("output", "FILE", figure, "write the figure to FILE (.png, .svg or .pdf) [DIR/compare.png]", "compare.svg"),
    Flag("x", "AXIS", choice(*X_AXES), f"draw over {', '.join(X_AXES)} [{STEPS}]", STEPS, default=STEPS),
    Flag("metric", "NAME", file_path, METRIC_HELP, "val/loss", default=()),
)

EXAMPLES = (
    "python launch/compare.py first second",
    "python launch/compare.py runs/first other-folder/runs/first --x samples --output figure.svg",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    title = "python launch/compare.py RUN RUN ...: compare runs, given by name or path (defaults are in brackets)"
    return run_command("compare", title, COMPARE_FLAGS, EXAMPLES, _compare, arguments)


def _compare(values: Mapping[str, Any], named: Sequence[str]) -> int:
    root = expanded(values["root"])
    paths = [_find(text, root, named) for text in named]
    paths = list({path.resolve(): path for path in paths}.values())
    if not paths:
        raise unknown_run_error("compare", "", root, "python launch/compare.py {}")
    if len(paths) > MAX_RUNS:
        some = " ".join(quoted(text) for text in named[:MAX_RUNS])
        found = f"{len(paths)} runs; one figure shows at most {MAX_RUNS}"
        raise RequestError("compare", found, f"python launch/compare.py {some}{root_flag(root)}")
    compared = comparison.read_compared_runs(paths)
    metrics, omitted = (list(values["metric"]), []) if values["metric"] else comparison.chosen_metrics(compared)
    _check_metrics(values["metric"], comparison.all_tags(compared))
    drawn, notes = comparison.panels(compared, metrics, values["x"])
    rows, unlisted = comparison.results(compared)
    labels = [entry.label for entry in compared]
    comparison.print_comparison(labels, comparison.differences([entry.config for entry in compared]), rows)
    notes = [note for entry in compared for note in entry.notes] + notes
    if len(compared) == 1:
        notes.append(f"one run{', named more than once' * (len(named) > 1)}: there are no settings to compare")
    if unlisted:
        notes.append(f"not in the table: {', '.join(unlisted)}")
    if omitted:
        panels = f"the figure has {comparison.MAX_PANELS} panels"
        notes.append(f"{panels}; --metric NAME draws one of {', '.join(omitted)}")
    if notes:
        print_line("\n".join(["", *(printable_line(note) for note in notes)]))
    if not drawn:
        print_line("no figure is written, because there are no curves")
        return Exit.FINISHED
    default = (root if os.path.isdir(root) else Path()) / "compare.png"  # noqa: PTH112 - see `is_run`
    return _write(expanded(values["output"] or default), labels, drawn, values["x"])


def _find(text: str, root: Path, requested: Sequence[str]) -> Path:
    """Returns the directory of a run.

    Raises:
        RequestError: There is no such run.
    """
    for path in (root / text, expanded(text)):
        if is_run(path):
            return path
    if os.path.isdir(expanded(text)):  # noqa: PTH112 - see `is_run`
        found = f"{expanded(text).absolute()} is not the directory of a run: it contains no run.json"
        raise RequestError(text, found, f"python launch/list.py{root_flag(root)}, to list the runs")
    others = ["{}" if word == text else quoted(word) for word in requested]
    raise unknown_run_error(text, text, root, f"python launch/compare.py {' '.join(others)}")


def _check_metrics(requested: Sequence[str], tags: Sequence[str]) -> None:
    """Raises an error for a metric of which no run has a curve."""
    for name in requested:
        if name not in tags:
            similar = similar_names(name, tags)
            listing = ", ".join(similar or tags[:20]) or "none; the runs have no curves"
            found = f"no run has a curve of this name; {'similar names' if similar else 'curves'}: {listing}"
            raise RequestError(f"--metric {name}", found, f"--metric {quoted((similar or tags or ['NAME'])[0])}")


def _write(path: Path, labels: Sequence[str], drawn: Sequence[comparison.Panel], kind: str) -> Exit:
    """Draws the figure and writes it; returns the exit code."""
    from rankzero.show.comparison_figure import draw, save  # imports matplotlib

    try:
        save(draw(labels, drawn, kind), path)
    except OSError as error:
        reason = error.strerror or str(error)
        print_error(f"the figure {path} cannot be written: {reason}; type --output FILE to write another file")
        return Exit.FAILED
    print_line(f"figure: {path}")
    return Exit.FINISHED
