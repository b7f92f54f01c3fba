"""The command `evaluate`: computes exact metrics of a run or a checkpoint."""

from collections.abc import Sequence

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.start import fast_imports, start
from rankzero.distributed.world import World

EVALUATE = Command(
    name="evaluate",
    purpose="compute exact metrics of a run or a checkpoint",
    examples=(
        "python launch/evaluate.py --name my-run --split test",
        "python launch/evaluate.py --checkpoint runs/my-run/checkpoints/step-00001000 --devices 2",
        "torchrun --nproc-per-node 4 launch/evaluate.py --name my-run --output metrics.json",
        "python launch/evaluate.py --name my-run --export model.safetensors",
    ),
    models=lightning_modules,
    data=data_modules,
)


def evaluate(flags: Arguments, world: World) -> int:
    """Imports torch, after the flags have been checked, and evaluates."""
    with fast_imports():
        from rankzero.commands.evaluation import evaluate

    return evaluate(flags, world)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(EVALUATE, evaluate, arguments)
