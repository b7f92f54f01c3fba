"""Time to the first step, compared with a script without a trainer, and to the output of --help and --explain.

python benchmarks/start.py                   # each 5 times, in turn
python benchmarks/start.py --pairs 1
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from contest import ROOT, Comparison, parser

BENCHMARKS = Path(__file__).parent
FIT = [sys.executable, str(ROOT / "launch/fit.py")]
TOY = ["--model", "MLP", "--data", "Toy", "--batch_size", "32"]
STEP_REPORT = "first step done"


def rankzero_seconds() -> float:
    """Returns the seconds that a run in a new folder, started as by a user, takes until its first step is done."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds_until_step([*FIT, *TOY, "--root", folder, "--trainer.callbacks", "first_step.FirstStep"])


def script_seconds() -> float:
    """Returns the seconds that a script with the same network and data, but without a trainer, takes."""
    return seconds_until_step([sys.executable, str(BENCHMARKS / "by_hand/first_step.py")])


def seconds_until_step(command: list[str]) -> float:
    """Returns the seconds from the start of a process until it reports its first step; the process is then killed."""
    # Without bytecode, each start would compile Rankzero's files again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=BENCHMARKS, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        has_reported = any(line.strip() == STEP_REPORT for line in process.stdout)
        seconds = time.perf_counter() - started
        process.kill()
    if not has_reported:
        sys.exit(f"{' '.join(command)}\nended without a step")
    return seconds


def seconds_to_print(flag: str) -> float:
    """Returns the seconds that `fit.py` takes with a flag that only prints text."""
    started = time.perf_counter()
    subprocess.run([*FIT, flag], cwd=BENCHMARKS, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


FIRST_STEP = Comparison(
    name="start",
    title="From the start of a process to the end of its first step: a linear layer, 2,048 samples, 32 a batch",
    unit="seconds",
    measure={"ours": rankzero_seconds, "a script that imports torch and torchvision": script_seconds},
    targets={"a script that imports torch and torchvision": 1.05},
)
PRINTED_TEXT = Comparison(
    name="answer",
    title="From the start of launch/fit.py to its end, where it only answers",
    unit="seconds",
    measure={flag: partial(seconds_to_print, flag) for flag in ("--help", "--explain")},
    limits={"--help": 1, "--explain": 1},
)


def main() -> None:
    """Measures the time to the first step, and the time to the printed output."""
    arguments = parser(__doc__).parse_args()
    for comparison in (FIRST_STEP, PRINTED_TEXT):
        comparison.run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
