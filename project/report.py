"""What a run tells a person: one line at the start, one table at the end."""

import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from project.environments.launch import Launch
from project.run_directory import RunDirectory
from project.say import show
from project.world import World


def start_line(run: RunDirectory, world: World, launch: Launch, checkpoint: Path | None) -> str:
    """The choice of launcher with its evidence, the world, and what is carried on."""
    processes = f"{launch.shape} on {world.accelerator}{', GPUs shared' * world.shared}"
    backend = f", {world.backend}, met at {launch.address}:{launch.port}" if world.size > 1 else ""
    carried = f", carrying on from {checkpoint.name}" if checkpoint else ""
    evidence = "".join(letter if letter.isprintable() else "?" for letter in launch.evidence)
    return f"{launch.launcher} ({evidence}): {processes}{backend}; run {run.path}{carried}"


def print_table(summary: dict[str, Any], run: RunDirectory, world: World) -> None:
    """Prints the end of an attempt."""
    table = Table(show_header=False, title=f"run {run.name}: {summary['status']}", title_justify="left")
    backend = f", {world.backend}" if world.size > 1 else ""
    table.add_row("ran on", f"{summary['launcher']}: {world.nodes} x {world.devices} {_device(world)}{backend}")
    table.add_row("epochs", f"{summary['epochs']} ({summary['steps']:,} steps, {summary['samples']:,} samples)")
    if summary["ledger"]:
        table.add_row("ledger", summary["ledger"][-1])
    table.add_row("speed", f"{summary['samples_per_second']:,.0f} samples/s; {summary['seconds']:.1f} s in all")
    for name, value in summary["metrics"].items():
        table.add_row(name, "not a finite number" if value is None else f"{value:.4f}")
    checkpoint = summary["checkpoint"]
    table.add_row("checkpoint", str(run.path / checkpoint) if checkpoint else "none")
    if summary["status"] != "finished":
        table.add_row("to carry on", f"the same command with --name {run.name}")
    table.add_row("TensorBoard", f"tensorboard --logdir {run.path / 'tensorboard'}")
    _print(table)


def print_evaluation(result: dict[str, Any], file: Path) -> None:
    """Prints the metrics of an evaluation."""
    table = Table(show_header=False, title=f"{result['split']} split of {result['run']}", title_justify="left")
    table.add_row("checkpoint", result["checkpoint"])
    table.add_row("samples", f"{result['samples']:,}, each once, on {result['world_size']} process(es)")
    for name, value in result["metrics"].items():
        table.add_row(name, f"{value:.6f}")
    table.add_row("written to", str(file))
    _print(table)


def print_predictions(result: dict[str, Any], folder: Path) -> None:
    """Prints what was predicted, and how it is read."""
    title = f"predictions of {result['run']} for its {result['split']} samples"
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_row("checkpoint", result["checkpoint"])
    for file, samples in result["samples"].items():
        table.add_row(file, f"{samples:,} samples, each once, on {result['world_size']} process(es)")
    table.add_row("written to", str(folder))
    table.add_row("to read it", f'torch.load("{folder / next(iter(result["samples"]))}", weights_only=True)')
    _print(table)


def _print(table: Table) -> None:
    """Prints a table as wide as it is, so that what is typed again stays whole; brackets in names mean nothing."""
    console = Console(markup=False, highlight=False)
    whole = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, whole)
    with console.capture() as capture:
        console.print(table, soft_wrap=True)
    show(capture.get().removesuffix("\n"))


def _device(world: World) -> str:
    if world.accelerator == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{world.accelerator} ({platform.machine()}, {torch.get_num_threads()} threads each)"
