"""Comparison of several implementations, measured in turn: medians, spreads and ratios, as a table and as JSON."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build/benchmarks"


@dataclass
class Comparison:
    """Comparison of Rankzero with other implementations. All figures are costs: lower is better.

    Args:
        name: Name of the comparison and of its JSON file.
        title: Title of the printed table.
        unit: Unit of the figures.
        measure: Variant -> function that measures it once. The first variant is Rankzero.
        targets: Variant -> highest acceptable cost of Rankzero, as a multiple of the variant's cost.
        limits: Variant -> highest acceptable cost of the variant, in `unit`. It is compared with this limit only.
    """

    name: str
    title: str
    unit: str
    measure: Mapping[str, Callable[[], float]]
    targets: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    def run(self, pairs: int, folder: Path = RESULTS) -> dict[str, Any]:
        """Measures all variants in turn, `pairs` times each; prints a table and writes `folder/NAME.json`.

        Returns:
            The content of the JSON file.
        """
        measured: dict[str, list[float]] = {name: [] for name in self.measure}
        for pair in range(pairs):
            names = list(self.measure)
            for name in names[pair % len(names) :] + names[: pair % len(names)]:  # rotated, so none is always first
                _print_progress(f"{self.name}: {pair + 1}/{pairs} {name}")
                measured[name].append(self.measure[name]())
        _print_progress("")
        ratios = self._ratios(measured)
        self._print(measured, ratios)
        result = {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
            **environment_info(),
            "measured": measured,
            "ratios": ratios,
            "targets": dict(self.targets),
            "limits": dict(self.limits),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _ratios(self, measured: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Returns Rankzero's figures as multiples of each other variant's, except variants with a limit."""
        rankzero, *other_names = measured
        return {
            name: [
                rankzero_cost / other_cost
                for rankzero_cost, other_cost in zip(measured[rankzero], measured[name], strict=True)
            ]
            for name in other_names
            if name not in self.limits
        }

    def _print(self, measured: Mapping[str, list[float]], ratios: Mapping[str, list[float]]) -> None:
        table = Table("", self.unit, "ratio of Rankzero to it", "target", title=self.title)
        for name, figures in measured.items():
            target = f"<= {self.targets[name]:g} x" if name in self.targets else ""
            target += f"<= {self.limits[name]:g}" if name in self.limits else ""
            table.add_row(name, format_spread(figures), format_spread(ratios[name]) if name in ratios else "", target)
        Console(width=120).print(table)


def format_spread(figures: list[float]) -> str:
    """Returns the median, the minimum and the maximum as text."""
    median = statistics.median(figures)
    decimals = 0 if median >= 100 else 1 if median >= 10 else 2 if median >= 0.5 else 3
    return f"{median:,.{decimals}f} ({min(figures):,.{decimals}f} to {max(figures):,.{decimals}f})"


def parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all benchmarks have: `--pairs` and `--json_dir`."""
    first, _, rest = doc.partition("\n")
    flags = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--pairs", type=int, default=5, help="how often each is measured, in turn")
    flags.add_argument("--json_dir", type=Path, default=RESULTS, help="where the JSON file goes")
    return flags


def run_for_json(command: list[str], threads: int | None = None) -> Any:
    """Runs a command and returns the value of its last line of output, which is JSON; see `run`."""
    return json.loads(run(command, threads).strip().splitlines()[-1])


def run(command: list[str], threads: int | None = None, codes: Collection[int] = (0,)) -> str:
    """Runs a command in `benchmarks/`, and returns its standard output. Exits if the command fails.

    Args:
        command: The program and its arguments.
        threads: Value of OMP_NUM_THREADS; None leaves the variable unchanged.
        codes: Exit codes that count as success.
    """
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    process = subprocess.run(command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, text=True)
    if process.returncode not in codes:
        sys.exit(
            f"{' '.join(command)}\nexit code {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        )
    return process.stdout


def environment_info() -> dict[str, Any]:
    """Returns the commit, versions and machine on which the figures depend."""
    import torch

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "commit": git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else ""),
        "machine": f"{os.cpu_count()} cores of {processor}",
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
    }


def _print_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
