"""Tables that show the result of a run, an evaluation or a prediction."""

import platform
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from rich.table import Table

from rankzero.distributed.world import World
from rankzero.messages import is_quiet, print_error, print_line, printable_line, spelled
from rankzero.runs.directory import RunDirectory
from rankzero.runs.summary import threads_text
from rankzero.show.text_table import rendered
from rankzero.text import metrics_line, nan_for_none, number_text, unique_metrics


class ResultDisplay:
    """Prints the result of an attempt, with the paths of its report and of the folders of its loggers."""

    def __init__(self, trainer: Trainer, run: RunDirectory, world: World) -> None:
        self._trainer, self._run, self._world = trainer, run, world

    def show_result(self, summary: dict[str, Any]) -> None:
        """Writes the report and prints the result."""
        here = "" if self._run.path.is_absolute() else f"{Path.cwd()}/"
        paths = [str(logger.log_dir) for logger in self._trainer.loggers if getattr(logger, "log_dir", None)]
        folders = [path.removeprefix(here) for path in paths]
        try:  # an update of the environment during the run may have removed what the page needs
            from rankzero.show.report.page import write_report

            report = write_report(self._run, summary)
        except Exception as error:
            report = None
            print_error(f"report.html could not be written: {error!r}")
        # mpirun gives its processes a terminal, also if output goes to a file
        is_local = summary["launcher"] == "local"
        print_line(self.result_text(summary, folders, report, has_colors=is_local))

    def result_text(
        self, summary: dict[str, Any], folders: Iterable[str] = (), report: Path | None = None, has_colors: bool = False
    ) -> str:
        """Returns the result of an attempt that has ended: a table, or one line if `--quiet` is set."""
        title, is_finished = f"run {self._run.name}: {summary['status']}", summary["status"] == "finished"
        next_purpose = "to resume" if summary["checkpoint"] else "to start again"
        next_command = f"the same command with --name {self._run.name}"
        if is_quiet():
            line = metrics_line(title, nan_for_none(summary["metrics"]), (), self._run.location, separator=", ")
            return line if is_finished else f"{line}; {spelled(f'{next_purpose}: {next_command}')}"
        world = self._world
        device = f"{world.accelerator} ({platform.machine()}, {threads_text(world)})"
        if world.accelerator == "cuda":
            device = str(torch.cuda.get_device_name())
        table = Table(show_header=False, title=title, title_justify="left")
        backend = f", {world.backend}" if world.size > 1 else ""
        is_even = world.size == world.nodes * world.devices
        processes = f"{world.nodes} x {world.devices}" if is_even else f"{world.size} processes on {world.nodes} nodes,"
        table.add_row("ran on", f"{summary['launcher']}: {processes} {device}{backend}")
        max_epochs = summary["max_epochs"] or -1
        epochs = f"{summary['epochs']}" + f" of {max_epochs}" * (summary["epochs"] < max_epochs)
        table.add_row("epochs", f"{epochs} ({summary['steps']:,} steps, {summary['samples']:,} samples)")
        if problem := summary.get("problem"):
            table.add_row("problem", textwrap.fill(printable_line(problem), 80), style="red")
        if summary["ledger"]:
            table.add_row("ledger", summary["ledger"][-1])
        speed = number_text(summary["samples_per_second"])
        part = f"in attempt {summary['attempts']}" if summary["attempts"] > 1 else "in total"
        table.add_row("speed", f"{speed} samples/s; {summary['seconds']:.1f} s {part}")
        for slow_rank in summary["slow_ranks"]:
            table.add_row("slow", slow_rank)
        for name, value in unique_metrics(nan_for_none(summary["metrics"])).items():
            table.add_row(printable_line(name), number_text(value))
        checkpoint = summary["checkpoint"]
        table.add_row("checkpoint", str(self._run.path / checkpoint) if checkpoint else "none")
        if not is_finished and self._run.is_kept:
            table.add_row(next_purpose, spelled(next_command))
        if report:
            table.add_row("report", str(report))
        for label, location in log_locations(self._run, folders):
            table.add_row(label, location)
        return rendered(table, has_colors)


def log_locations(run: RunDirectory, folders: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the table rows that locate logged metrics: only folders that contain files, each once.

    TensorBoard shows all runs of the root. It listens on this machine only, since it has no password.
    """
    rows = []
    for folder in dict.fromkeys([*map(Path, folders), run.path / "tensorboard"]):
        if any(folder.glob("events.out.tfevents.*")):
            shown = run.path.parent if folder == run.path / "tensorboard" else folder
            rows.append(("TensorBoard", f"tensorboard --logdir {shown} --host localhost"))
        if (folder / "metrics.csv").is_file():
            rows.append(("metrics", str(folder / "metrics.csv")))
    return rows


def print_evaluation(result: dict[str, Any], file: Path) -> None:
    """Prints the metrics of an evaluation: a table, or one line if `--quiet` is set."""
    if is_quiet():
        head = f"{result['split']} split of {result['run']}: {result['samples'] or 'uncounted'} samples"
        print_line(metrics_line(head, result["metrics"], (), str(file), separator=", "))
        return
    samples = result["samples"]
    sample_count = "not counted (a loader has its own sample order)" if samples is None else f"{samples:,}, each once"
    rows = [("checkpoint", result["checkpoint"]), ("samples", f"{sample_count}, on {_processes(result)}")]
    rows += [(printable_line(name), number_text(value, digits=6)) for name, value in result["metrics"].items()]
    _print(f"{result['split']} split of {result['run']}", [*rows, ("written to", str(file))])


def print_predictions(result: dict[str, Any], folder: Path) -> None:
    """Prints the number of predictions in each file, and the line that loads them; one line if `--quiet` is set."""
    title = f"predictions of {result['run']} for its {result['split']} samples"
    if is_quiet():
        print_line(f"{title}: {sum(result['samples'].values())} samples, {folder}")
        return
    rows = [("checkpoint", result["checkpoint"])]
    for file, samples in result["samples"].items():
        rows.append((file, f"{samples:,} samples, each once, on {_processes(result)}"))
    load_call = f'torch.load("{folder / next(iter(result["samples"]))}", weights_only=True)'
    _print(title, [*rows, ("written to", str(folder)), ("to load it", load_call)])


def _processes(result: Mapping[str, Any]) -> str:
    count = result["world_size"]
    return f"{count} process{'es' * (count != 1)}"


def _print(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints a table without colors: mpirun gives its processes a terminal, also if their output goes to a file."""
    table = Table(show_header=False, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    print_line(rendered(table, has_colors=False))
