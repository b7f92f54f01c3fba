"""Compute exact metrics of a run or a checkpoint.

python launch/evaluate.py                                   # the newest run's validation split
python launch/evaluate.py --name my-run --split test
torchrun --nproc-per-node 4 launch/evaluate.py --checkpoint runs/my-run/checkpoints/step-00001000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that no package of the user's hides ours

import data_modules
import lightning_modules
from project.command import Command
from project.command_line import Flags
from project.environments.roll_call import Meeting
from project.flags import EVALUATING, RUNNING
from project.quick_imports import quick_imports
from project.start import start

EVALUATE = Command(
    name="evaluate",
    purpose="compute exact metrics of a run or a checkpoint",
    flags=(*RUNNING, *EVALUATING),
    examples=(
        "python launch/evaluate.py --name my-run --split test",
        "python launch/evaluate.py --checkpoint runs/my-run/checkpoints/step-00001000 --devices 2",
        "torchrun --nproc-per-node 4 launch/evaluate.py --name my-run --output metrics.json",
        "python launch/evaluate.py --name my-run --export model.safetensors",
    ),
    models=lightning_modules,
    data=data_modules,
)


def evaluate(flags: Flags, meeting: Meeting) -> int:
    """Imports torch, now that the flags are known to be sound, and evaluates."""
    with quick_imports():
        from project.evaluation import evaluate

    return evaluate(flags, meeting)


if __name__ == "__main__":
    sys.exit(start(EVALUATE, evaluate))
