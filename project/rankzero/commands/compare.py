"""The command `compare`: prints how runs differ, and draws their curves. Does not import torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.cli.flags import Flag
from rankzero.cli.flags.command_line import exit_code_of, help_text, parse
from rankzero.cli.flags.values import choice, file_path
from rankzero.cli.foreign_flags import quoted, similar_names
from rankzero.messages import Exit, RequestError, print_line, printable
from rankzero.runs.reports.comparison.compared_run import ComparedRun, read_compared_runs
from rankzero.runs.reports.comparison.panels import MAX_PANELS, Panel, all_tags, chosen_metrics, panels
from rankzero.runs.reports.comparison.results import results
from rankzero.runs.reports.comparison.settings import differences
from rankzero.runs.reports.comparison.tables import print_comparison
from rankzero.runs.reports.comparison.x_axis import STEPS, X_AXES
from rankzero.runs.reports.recorded.recorded_run import is_run
from rankzero.runs.reports.run_list import runs_in

MAX_RUNS = 8
"""Number of runs whose curves a person can distinguish by color and style."""

FORMATS = (".png", ".svg", ".pdf")


def figure_file(text: str) -> str:
    """Reads the path of a figure; its suffix must be one of `FORMATS`."""
    if not file_path(text).lower().endswith(FORMATS):
        raise ValueError("a file that ends in " + ", ".join(FORMATS))
    return text


COMPARE_FLAGS = (
    Flag("root", "DIR", file_path, "folder of the runs [runs]", "runs", default="runs"),
    Flag(
        "output", "FILE", figure_file, "write the figure to FILE (.png, .svg or .pdf) [DIR/compare.png]", "compare.svg"
    ),
    Flag("x", "AXIS", choice(*X_AXES), f"draw over {', '.join(X_AXES)} [{STEPS}]", STEPS, default=STEPS),
    Flag(
        "metric",
        "NAME",
        file_path,
        "draw only this metric; can be repeated [train loss and validation metrics]",
        "val/loss",
        default=(),
    ),
)

EXAMPLES = (
    "python launch/compare.py first second",
    "python launch/compare.py runs/first other-folder/runs/first --x samples --output figure.svg",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return exit_code_of(lambda: _compare(sys.argv[1:] if arguments is None else arguments))


def _compare(arguments: Sequence[str]) -> int:
    command_line = parse("compare", COMPARE_FLAGS, arguments)
    if command_line.wants_help:
        title = "python launch/compare.py RUN RUN ...: compare runs, given by name or path (defaults are in brackets)"
        print_line(help_text(title, COMPARE_FLAGS, EXAMPLES))
        return Exit.FINISHED
    values = command_line.values
    root = Path(values["root"]).expanduser()
    paths = [_find(text, root, command_line.positional) for text in command_line.positional]
    paths = list({path.resolve(): path for path in paths}.values())
    if not 1 <= len(paths) <= MAX_RUNS:
        newest = [path.name for path in _names(root)[-2:]] if not paths else [path.name for path in paths[:MAX_RUNS]]
        found = "no run is named" if not paths else f"{len(paths)} runs; one figure shows at most {MAX_RUNS}"
        instead = " ".join(quoted(name) for name in newest) or "RUN RUN"
        raise RequestError(
            " ".join(["compare", *command_line.positional]), found, f"python launch/compare.py {instead}"
        )
    compared = read_compared_runs(paths)
    metrics, omitted = (list(values["metric"]), []) if values["metric"] else chosen_metrics(compared)
    _check_metrics(values["metric"], compared)
    drawn, notes = panels(compared, metrics, values["x"])
    if metrics and not drawn and any(entry.curves for entry in compared):
        raise RequestError(f"--x {values['x']}", "\n".join(notes), f"--x {STEPS}")
    rows, unlisted = results(compared)
    labels = [entry.label for entry in compared]
    print_comparison(labels, differences([entry.config for entry in compared]), rows)
    notes = [note for entry in compared for note in entry.notes] + notes
    if len(compared) == 1:
        notes.append("one run: there are no settings to compare")
    if unlisted:
        notes.append(f"not in the table: {', '.join(unlisted)}")
    if omitted:
        notes.append(f"the figure has {MAX_PANELS} panels; --metric NAME draws one of {', '.join(omitted)}")
    if notes:
        print_line("\n".join(["", *(printable(note).replace("\n", "?") for note in notes)]))
    if not drawn:
        print_line("no figure is written, because there are no curves")
        return Exit.FINISHED
    default = (root if root.is_dir() else Path()) / "compare.png"
    print_line(f"figure: {_write(Path(values['output'] or default).expanduser(), labels, drawn, values['x'])}")
    return Exit.FINISHED


def _find(text: str, root: Path, requested: Sequence[str]) -> Path:
    """Returns the directory of a run.

    Args:
        text: Its name in the root, or its path.
        root: Folder of the runs.
        requested: All requested runs, for the message.

    Raises:
        RequestError: There is no such run.
    """
    for path in (root / text, Path(text).expanduser()):
        if is_run(path):
            return path
    names = [path.name for path in _names(root)]
    similar = similar_names(text, names)
    if Path(text).is_dir():
        found = f"{Path(text).absolute()} is not the directory of a run: it contains no run.json"
    elif not names:
        found = f"{root.absolute()} contains no runs"
    elif similar:
        found = f"there is no such run in {root.absolute()}; similar names: {', '.join(similar)}"
    else:
        found = f"there is no such run in {root.absolute()}; the newest runs: {', '.join(names[-5:])}"
    corrected = " ".join(quoted(similar[0] if similar and word == text else word) for word in requested)
    instead = f"python launch/compare.py {corrected}" if similar else "python launch/list.py, to list the runs"
    raise RequestError(text, found, instead if names else "--root DIR, where DIR contains runs")


def _names(root: Path) -> list[Path]:
    """Returns the runs of a root, the one started last at the end; none if it cannot be read."""
    try:
        return [path for _, path in runs_in(root)]
    except OSError:
        return []


def _check_metrics(requested: Sequence[str], compared: Sequence[ComparedRun]) -> None:
    """Raises an error for a metric of which no run has a curve."""
    tags = all_tags(compared)
    for name in requested:
        if name not in tags:
            similar = similar_names(name, tags)
            listing = ", ".join(similar or tags[:20]) or "none; the runs have no curves"
            found = f"no run has a curve of this name; {'similar names' if similar else 'curves'}: {listing}"
            raise RequestError(f"--metric {name}", found, f"--metric {quoted((similar or tags or ['NAME'])[0])}")


def _write(path: Path, labels: Sequence[str], drawn: Sequence[Panel], kind: str) -> Path:
    """Draws the figure and writes it; returns its path.

    Raises:
        RequestError: It cannot be written.
    """
    from rankzero.runs.reports.comparison.figure import draw, save  # imports matplotlib

    try:
        save(draw(labels, drawn, kind), path)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}"
        raise RequestError(f"a figure in {path.parent}", reason, "--output FILE, where you may write") from None
    return path
