"""Writes the outputs of a model's `predict_step`, one row for each sample, in the order of the samples.

python launch/predict.py --name my-run --output predictions       # samples of predict_dataloader
python launch/predict.py --name my-run --split test               # samples of test_dataloader
torchrun --nproc-per-node 4 launch/predict.py --checkpoint runs/my-run/checkpoints/step-00001000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "project"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # first, so that a user's package cannot hide Rankzero's

from rankzero.commands.predict import main
from rankzero.distributed.process.at_exit import exit_quickly_with

if __name__ == "__main__":
    sys.exit(exit_quickly_with(main()))
