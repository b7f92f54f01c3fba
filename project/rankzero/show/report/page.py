"""Writes `report.html`, a page on a run that needs no network and no program. Does not import torch."""

import base64
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from rankzero.checkpoints.atomic_files import write_text
from rankzero.checkpoints.manifest import checkpoints_in, read_manifest
from rankzero.messages import print_error, printable, spelled
from rankzero.runs.directory import RunDirectory
from rankzero.runs.recorded_run import read_run
from rankzero.runs.secrets import HIDDEN, command_without_secrets, launch_line, without_secrets
from rankzero.runs.stored_config import flattened, read_config
from rankzero.show.report.charts import HEIGHT, WIDTH, charts_of
from rankzero.show.report.curves import read_curves
from rankzero.text import duration, nan_for_none, number_text, unique_metrics


class NextCommand(NamedTuple):
    """A command for the user."""

    purpose: str
    command: str = ""


def next_commands(
    run: RunDirectory, summary: Mapping[str, Any], environment: Mapping[str, Any], has_curves: bool
) -> list[NextCommand]:
    """Returns the commands that resume or evaluate a run, and show its curves."""
    root = [] if str(run.path.parent) == "runs" else ["--root", str(run.path.parent)]
    name = ["--name", run.name]
    commands = []
    if summary.get("status") != "finished":
        commands.append(_resume(run, environment, root, has_checkpoint=bool(summary.get("checkpoint"))))
    elif environment and not environment.get("is_script") and summary.get("checkpoint") and summary["can_validate"]:
        evaluate = f"{_evaluate(environment)} {shlex.join([*name, *root])}"
        commands.append(NextCommand("Evaluate the newest checkpoint", evaluate))
    if has_curves:
        command = ["tensorboard", "--logdir", str(run.path.parent), "--host", "localhost"]
        commands.append(NextCommand("Show all curves", shlex.join(command)))
    return commands


def _evaluate(environment: Mapping[str, Any]) -> str:
    """Returns the beginning of the command that evaluates, with the interpreter and the folder of the run's command."""
    words = environment.get("command") or []
    for number, word in enumerate(words):
        if Path(word).name == "fit.py":
            return shlex.join([*words[:number], str(Path(word).with_name("evaluate.py"))])
    return spelled("python launch/evaluate.py")


def _resume(
    run: RunDirectory, environment: Mapping[str, Any], root: Sequence[str], has_checkpoint: bool
) -> NextCommand:
    purpose = "Resume" if has_checkpoint else "Start again"
    if (run.path.parent / f"{run.name}.job.sh").is_file():
        return NextCommand(purpose, f"{spelled('python launch/submit.py')} {shlex.join(['resume', run.name, *root])}")
    same_command = spelled(f"the same command with --name {run.name}")
    tokens = command_without_secrets(environment.get("command") or [])
    if has_checkpoint:  # `--resume never` would start the run from the beginning again
        flags, pairs = ("--resume", "--ckpt_path"), pairwise(["", *tokens])
        tokens = [token for previous, token in pairs if previous not in flags and token.partition("=")[0] not in flags]
    if not tokens:
        return NextCommand(f"{purpose}: {same_command}")
    if environment.get("is_script"):
        purpose += f": {same_command}"
    elif not any(token.partition("=")[0] in ("--name", "--run", "--run_name") for token in tokens):
        tokens += ["--name", run.name]
    if any(HIDDEN in token for token in tokens):
        purpose += f", with the secret values in place of {HIDDEN}"
    if environment.get("launcher") != "local":
        purpose += f", with the launch line of {environment.get('launcher')}; each process runs"
    return NextCommand(purpose, shlex.join(tokens))


REPORT = "report.html"
TEMPLATES = Path(__file__).parent / "templates"

MAX_CHECKPOINTS, MAX_LEDGER_LINES, MAX_ATTEMPTS = 20, 12, 50
MAX_REASON = 12_000
"""Characters of an error that the page shows: its beginning and its end."""

MAX_FIGURES, MAX_FIGURE_BYTES = 24, 1 << 21


def write_report(run: RunDirectory, summary: Mapping[str, Any]) -> Path | None:
    """Writes the report of a run that has trained at least one step; returns its path, or None if it was not written.

    Never raises: the result of a run does not depend on its report. Writes nothing if a newer attempt has begun, which
    writes the report at its own end.
    """
    if not run.is_kept:
        return None
    try:
        if not summary["steps"] and not any(attempt.get("step") for attempt in run.attempts):
            return None
        page = render(run, summary)
        if run.is_taken_over:
            return None
        write_text(run.path / REPORT, page)
    except Exception as error:
        reason = error if isinstance(error, OSError) else repr(error)
        print_error(f"{run.path / REPORT} could not be written: {reason}")
        return None
    return run.path / REPORT


def render(run: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Returns the report of a run."""
    curves = read_curves(run.path)
    attempts = list(_attempts(run, summary))
    environment = attempts[-1]["environment"] if attempts else {}
    figures, omitted_figures = _figures(run.path / "figures")
    ledger = list(_grouped(summary["ledger"]))
    settings = flattened(without_secrets(read_config(read_run(run.path).config)))
    template = _environment().get_template(REPORT)
    page = template.render(
        summary=summary,
        reason=_shortened(str(summary.get("reason") or summary.get("problem") or "")),
        metrics=_metric_texts(summary["metrics"], curves),
        commands=next_commands(run, summary, environment, bool(curves)),
        charts=charts_of(curves, [attempt["step"] for attempt in attempts]),
        attempts=attempts[-MAX_ATTEMPTS:],
        omitted_attempts=max(0, len(attempts) - MAX_ATTEMPTS),
        ledger=ledger[-MAX_LEDGER_LINES:],
        has_omitted_epochs=len(ledger) > MAX_LEDGER_LINES,
        checkpoints=list(_checkpoints(run, summary)),
        configuration={name: value for name, value in settings.items() if value is not None and name},
        environment=environment,
        figures=figures,
        omitted_figures=omitted_figures,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        width=WIDTH,
        height=HEIGHT,
    )
    return page.encode(errors="replace").decode()


@cache  # an environment keeps its compiled templates
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=_visible,
    )
    environment.filters.update(duration=duration, count="{:,}".format)
    return environment


def _visible(value: Any) -> Any:
    """Replaces control characters and characters that change the direction of text."""
    return printable(value.expandtabs(4)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _attempts(run: RunDirectory, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the attempts, oldest first, with what each of them has stored."""
    records = run.attempts
    for number, record in enumerate(records, 1):
        folder, started = f"attempts/{number:04d}", str(record.get("started"))
        own = summary if number == len(records) else run.read(f"{folder}/summary.json")
        environment = run.read(f"{folder}/environment.json")
        yield {
            "number": number,
            "started": f"{started[:10]} {started[11:16]} UTC" if started.endswith("+00:00") else started,
            "host": record.get("host"),
            "job": record.get("job"),
            "step": int(record.get("step") or 0),
            "last_step": own.get("steps"),
            "seconds": own.get("seconds"),
            "status": own.get("status") or "ended without a summary",
            "environment": environment,
            "launch_line": launch_line(environment),
        }


def _grouped(entries: Iterable[str]) -> Iterator[str]:
    """Yields the entries of the ledger, with a single one for adjacent entries that differ only in their epoch."""
    for text, group in groupby((entry.partition(": ") for entry in entries), key=lambda parts: parts[2]):
        epochs = [epoch for epoch, _, _ in group]
        first, last = epochs[0], epochs[-1].removeprefix("epoch ")
        if len(epochs) == 1:
            yield f"{first}: {text}"
        else:
            yield f"{first.replace('epoch', 'epochs')} to {last}: {text.replace(' samples', ' samples per epoch')}"


def _checkpoints(run: RunDirectory, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the newest checkpoints, newest first."""
    for path in reversed(checkpoints_in(run.checkpoints)[-MAX_CHECKPOINTS:]):
        try:
            manifest = read_manifest(path)
        except ValueError:
            continue
        relative_path = str(path.relative_to(run.path))
        marks = {"newest": summary.get("checkpoint"), "best": summary.get("best")}
        metrics = manifest["rankzero"].get("metrics")
        yield {
            "path": relative_path,
            "step": manifest["step"],
            "epoch": manifest["epoch"],
            "bytes": sum(file["bytes"] for file in manifest["files"].values()),
            "metrics": _metric_texts(metrics if isinstance(metrics, dict) else {}),
            "marks": [mark for mark, marked in marks.items() if marked == relative_path],
        }


def _metric_texts(metrics: Mapping[str, float | None], curves: Iterable[str] = ()) -> dict[str, str]:
    """Returns each metric of a summary as text, once.

    The curve `train/loss` is the mean over all samples of an interval, unless the model logs a curve of that name. A
    metric `train/loss` is then another value, usually that of the last batch.
    """
    texts = {name: number_text(value) for name, value in unique_metrics(nan_for_none(metrics)).items()}
    if "train/loss" not in texts or "train/loss" not in curves or "train/mean_loss" in curves:
        return texts
    return {name.replace("train/loss", "train/loss as logged by the model"): text for name, text in texts.items()}


def _figures(folder: Path) -> tuple[list[tuple[str, str]], int]:
    """Returns images of a folder, such as a confusion matrix, as pairs of name and data URI, and the number of others.

    The newest images of at most `MAX_FIGURE_BYTES` bytes are shown.
    """
    files = [(path.stat(), path) for path in folder.glob("*.png") if path.is_file()]
    small = [(stat.st_mtime, path) for stat, path in files if stat.st_size <= MAX_FIGURE_BYTES]
    shown = sorted(path for _, path in sorted(small)[-MAX_FIGURES:])
    figures = []
    for path in shown:
        with suppress(OSError):  # a file that may not be read
            content = base64.b64encode(path.read_bytes()).decode()
            figures.append((path.stem.replace("_", " "), f"data:image/png;base64,{content}"))
    return figures, len(files) - len(figures)


def _shortened(text: str) -> str:
    half = MAX_REASON // 2
    return text if len(text) <= MAX_REASON else f"{text[:half]}\n...\n{text[-half:]}"
