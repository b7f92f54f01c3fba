"""The command `fit`: trains a model, or resumes its training."""

from collections.abc import Sequence

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.fast_imports import fast_imports
from rankzero.commands.start import start
from rankzero.distributed.world import World

FIT = Command(
    name="fit",
    purpose="train a model, or resume its training",
    examples=(
        "python launch/fit.py --model MLP --data Toy --epochs 50 --save_every 10 --batch_size 32",
        "torchrun --nproc-per-node 4 launch/fit.py --model ResNet --model.depth 50 --data FashionMNIST",
        "srun --nodes=2 --ntasks-per-node=4 python launch/fit.py --model my_package.MyModel --data my_package.MyData",
    ),
    models=lightning_modules,
    data=data_modules,
    default_model="ResNet",
    default_data="Digits",
    stops_at_safe_point=True,
)


def fit(flags: Arguments, world: World) -> int:
    """Imports torch, after the flags have been checked, and trains."""
    with fast_imports():
        from rankzero.commands.implementations.training import fit

    return fit(flags, world)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(FIT, fit, arguments)
