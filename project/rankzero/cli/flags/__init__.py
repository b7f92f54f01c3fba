"""The short flags of the commands. Does not import torch.

A flag with a `lightning_key` is another name for a LightningCLI key (`--epochs` is `--trainer.max_epochs`), both in
YAML and on the command line. `rankzero.cli.lightning_cli` adds all other flags to LightningCLI.
"""

from rankzero.cli.flags.commands import EVALUATION_FLAGS, PREDICTION_FLAGS, PREFLIGHT_FLAGS, TRAINING_FLAGS
from rankzero.cli.flags.common import COMMON_FLAGS
from rankzero.cli.flags.flag import Flag

__all__ = ["COMMON_FLAGS", "EVALUATION_FLAGS", "PREDICTION_FLAGS", "PREFLIGHT_FLAGS", "TRAINING_FLAGS", "Flag"]
