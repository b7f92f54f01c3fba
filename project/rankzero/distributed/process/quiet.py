"""Silences library messages that require no action. All output that the user requested is printed, once per job.

Profilers, finders, callbacks with `verbose=True` and a module's `rank_zero_info` log at level INFO. So does Lightning
(2.6) for remarks about itself. The remarks are therefore matched by their text, and all other messages pass.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rankzero.distributed.process.lightning_names import real_name
from rankzero.distributed.process.system import variables

_WARNINGS = (
    r".*does not have many workers which may be a bottleneck.*",  # data in memory needs no workers
    r".*`srun` command is available on your system but is not used.*",  # the start line names the detected launcher
    r".*is smaller than the logging interval.*",
    r".*your dataloader is not resumable.*",  # rankzero.sampling makes it resumable
    r".*No seed found.*",
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning uses a deprecated torch API
    r"\s*Unable to serialize instance .*",  # runs/stored_config.py omits the instance
    r".*JsonargparseDeprecationWarning.*",  # Lightning uses a deprecated jsonargparse API
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

_REMARK_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",  # used by `rank_zero_info`
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.fabric.utilities.distributed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
)
"""Loggers that emit the remarks. A filter on a parent logger does not apply to its child loggers."""


def silence_warnings(rank: int = 0) -> None:
    """Silences the remarks, and on ranks other than zero all of Lightning's messages below level WARNING."""
    if rank:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(real_name(name)).setLevel(logging.WARNING)
    for name in _REMARK_LOGGERS:
        logging.getLogger(real_name(name)).addFilter(_is_no_remark)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    if not _replaced_formatters:
        _replaced_formatters.append(warnings.formatwarning)
        warnings.formatwarning = _formatted


def silenced_kineto(silences: bool) -> AbstractContextManager[None]:
    """Silences the library of torch's profiler if it starts within this context; it reads its log level only once.

    At every trace, it prints internal events and, on a machine without a GPU, an error (torch 2.15). On a GPU, its
    errors matter: they explain why a trace lacks the GPU.
    """
    is_set = "KINETO_LOG_LEVEL" in os.environ
    return variables(KINETO_LOG_LEVEL="99") if silences and not is_set else nullcontext()


_replaced_formatters: list[Callable[..., str]] = []


def _formatted(message: Warning | str, *details: Any, **named_details: Any) -> str:
    """Formats a warning; one of Rankzero's own without the line of its source that issued the warning."""
    is_own = str(message).startswith("rankzero: ")
    return f"{message}\n" if is_own else _replaced_formatters[0](message, *details, **named_details)


def _is_no_remark(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or not _REMARKS.match(record.getMessage().lstrip())
