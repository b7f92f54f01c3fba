"""Write what a model's `predict_step` returns, one row for each sample, in the order of the samples.

python launch/predict.py --name my-run --output predictions       # the samples of predict_dataloader
python launch/predict.py --name my-run --split test               # those of test_dataloader
torchrun --nproc-per-node 4 launch/predict.py --checkpoint runs/my-run/checkpoints/step-00001000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that no package of the user's hides ours

import data_modules
import lightning_modules
from project.command import Command
from project.command_line import Flags
from project.environments.roll_call import Meeting
from project.flags import PREDICTING, RUNNING
from project.quick_imports import quick_imports
from project.start import start

PREDICT = Command(
    name="predict",
    purpose="write what predict_step returns, each sample once, in order",
    flags=(*RUNNING, *PREDICTING),
    examples=(
        "python launch/predict.py --name my-run --output predictions",
        "python launch/predict.py --name my-run --split test --devices 2",
        "torchrun --nproc-per-node 4 launch/predict.py --checkpoint runs/my-run/checkpoints/step-00001000",
    ),
    models=lightning_modules,
    data=data_modules,
)


def predict(flags: Flags, meeting: Meeting) -> int:
    """Imports torch, now that the flags are known to be sound, and predicts."""
    with quick_imports():
        from project.prediction import predict

    return predict(flags, meeting)


if __name__ == "__main__":
    sys.exit(start(PREDICT, predict))
