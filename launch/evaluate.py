"""Computes exact metrics of a run or a checkpoint.

python launch/evaluate.py                                   # validation split of the newest run
python launch/evaluate.py --name my-run --split test
torchrun --nproc-per-node 4 launch/evaluate.py --checkpoint runs/my-run/checkpoints/step-00001000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.evaluate import main
from rankzero.distributed.process.at_exit import exit_quickly_with

if __name__ == "__main__":
    sys.exit(exit_quickly_with(main()))
