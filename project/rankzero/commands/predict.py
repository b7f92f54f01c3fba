"""The command `predict`: writes the outputs of `predict_step`, each sample once, in the order of the samples."""

from collections.abc import Sequence

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.start import fast_imports, start
from rankzero.distributed.world import World

PREDICT = Command(
    name="predict",
    purpose="write the results of predict_step in the order of the samples",
    examples=(
        "python launch/predict.py --name my-run --output predictions",
        "python launch/predict.py --name my-run --split test --devices 2",
        "torchrun --nproc-per-node 4 launch/predict.py --checkpoint runs/my-run/checkpoints/step-00001000",
    ),
    models=lightning_modules,
    data=data_modules,
)


def predict(flags: Arguments, world: World) -> int:
    """Imports torch, after the flags have been checked, and predicts."""
    with fast_imports():
        from rankzero.commands.prediction import predict

    return predict(flags, world)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(PREDICT, predict, arguments)
