"""Train a model, or carry on training it.

python launch/fit.py                                                  # one process
torchrun --nproc-per-node 4 launch/fit.py --model ResNet --data FashionMNIST
srun python launch/fit.py --nodes 2 --devices 4                       # one task a device
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that no package of the user's hides ours

import data_modules
import lightning_modules
from project.command import Command
from project.command_line import Flags
from project.environments.roll_call import Meeting
from project.flags import RUNNING, TRAINING
from project.quick_imports import quick_imports
from project.start import start

FIT = Command(
    name="fit",
    purpose="train a model, or carry on training it",
    flags=(*RUNNING, *TRAINING),
    examples=(
        "python launch/fit.py --model MLP --data Toy --epochs 50 --save_every 10 --batch_size 32",
        "torchrun --nproc-per-node 4 launch/fit.py --model ResNet --model.depth 50 --data FashionMNIST",
        "srun python launch/fit.py --nodes 2 --devices 4 --model my_package.MyModel --data my_package.MyData",
    ),
    models=lightning_modules,
    data=data_modules,
    default_model="ResNet",
    default_data="Digits",
    stops_safely=True,
)


def fit(flags: Flags, meeting: Meeting) -> int:
    """Imports torch, now that the flags are known to be sound, and trains."""
    with quick_imports():
        from project.cli import fit

    return fit(flags, meeting)


if __name__ == "__main__":
    sys.exit(start(FIT, fit))
