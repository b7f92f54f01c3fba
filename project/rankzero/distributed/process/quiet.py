"""Silences library messages that require no action. Everything that a user requested is printed, once per job.

Reports of profilers and finders, `verbose=True` of callbacks and a module's own `rank_zero_info` are messages of level
INFO, as are Lightning's (2.6) remarks about itself. So the remarks are named here, and all other messages pass.
"""

import logging
import re
import warnings

_WARNINGS = (
    r".*does not have many workers which may be a bottleneck.*",  # data in memory needs none
    r".*`srun` command is available on your system but is not used.*",  # the start line says what was detected
    r".*is smaller than the logging interval.*",
    r".*your dataloader is not resumable.*",  # rankzero.sampling resumes it
    r".*No seed found.*",
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning of torch
    r"\s*Unable to serialize instance .*",  # runs/stored_config.py leaves it out
    r".*JsonargparseDeprecationWarning.*",  # Lightning of jsonargparse
    r".*JSONARGPARSE_DEPRECATION_WARNINGS.*",
    r".*was deprecated in v4.*will be removed in v5.*",
    r".*Checkpoint directory .* exists and is not empty.*",
)

_REMARKS = re.compile(
    r"(\[rank: \d+\] )?("
    r"(GPU|TPU|HPU) available: |💡 Tip: |LOCAL_RANK: |Seed set to |Initializing distributed: |-+\ndistributed_backend="
    r"|`Trainer\.fit` stopped: |`Trainer\(.*\)` was configured so |Using (16bit|bfloat16) Automatic Mixed Precision"
    r"|Restoring states from the checkpoint path |Restored all states from |Loaded model weights from "
    r"|`weights_only` was not set|Loading `train_dataloader` to estimate |Your model can run with static graph "
    r"|Found current_model_state in the checkpoint|You're using the WeightAveraging callback, but saving "
    r")"
)

_SOURCES = (
    "lightning.pytorch.utilities.rank_zero",  # of `rank_zero_info`
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.fabric.utilities.distributed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
"""Loggers that emit the remarks. A filter on a parent logger would not see them."""


def silence_warnings(rank: int = 0) -> None:
    """Silences the remarks on rank zero, and all messages below the level of a warning on other ranks.

    Args:
        rank: The rank of this process.
    """
    if rank:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
    for name in _SOURCES:
        logging.getLogger(name).addFilter(_is_no_remark)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _is_no_remark(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or not _REMARKS.match(record.getMessage().lstrip())
