"""Time to the first step, compared with a script without a trainer, and to the output of --help and --explain.

python benchmarks/start.py                   # each 5 times, in turn
python benchmarks/start.py --pairs 1
"""

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from contest import ROOT, Contest, parser

BENCHMARKS = Path(__file__).parent
FIT = [sys.executable, str(ROOT / "launch/fit.py")]
TOY = ["--model", "MLP", "--data", "Toy", "--batch_size", "32"]
DONE = "first step done"


def ours() -> float:
    """Returns the seconds that a run in a new folder, started as by a user, takes until its first step is done."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds_until_done([*FIT, *TOY, "--root", folder, "--trainer.callbacks", "first_step.FirstStep"])


def by_hand() -> float:
    """Returns the seconds that a script with the same network and data, but without a trainer, takes."""
    return seconds_until_done([sys.executable, str(BENCHMARKS / "by_hand/first_step.py")])


def seconds_until_done(command: list[str]) -> float:
    """Returns the seconds from the start of a process until it reports its first step; the process is then killed."""
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said = any(line.strip() == DONE for line in process.stdout)
        seconds = time.perf_counter() - started
        process.kill()
    if not said:
        sys.exit(f"{' '.join(command)}\nended without a step")
    return seconds


def seconds_to_answer(flag: str) -> float:
    """Returns the seconds that `fit.py` takes with a flag that only prints text."""
    started = time.perf_counter()
    subprocess.run([*FIT, flag], cwd=BENCHMARKS, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


STEP = Contest(
    name="start",
    title="From the start of a process to the end of its first step: a linear layer, 2,048 samples, 32 a batch",
    unit="seconds",
    measure={"ours": ours, "a script that imports torch and torchvision": by_hand},
    targets={"a script that imports torch and torchvision": 1.15},
)
ANSWER = Contest(
    name="answer",
    title="From the start of launch/fit.py to its end, where it only answers",
    unit="seconds",
    measure={flag: partial(seconds_to_answer, flag) for flag in ("--help", "--explain")},
    limits={"--help": 1, "--explain": 1},
)


def main() -> None:
    """Measures the time to the first step, and the time to the printed output."""
    arguments = parser(__doc__).parse_args()
    for contest in (STEP, ANSWER):
        contest.run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
