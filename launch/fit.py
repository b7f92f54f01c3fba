"""Trains a model, or resumes its training.

python launch/fit.py                                                  # one process
torchrun --nproc-per-node 4 launch/fit.py --model ResNet --data FashionMNIST
srun python launch/fit.py --nodes 2 --devices 4                       # one task per device
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.fit import main
from rankzero.distributed.process.at_exit import exit_quickly_with

if __name__ == "__main__":
    sys.exit(exit_quickly_with(main()))
