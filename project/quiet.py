"""Keeps quiet what the libraries say and nobody can act on: a run has one start line and one table at the end."""

import logging
import warnings

_NOISE = (
    r".*does not have many workers which may be a bottleneck.*",  # data in memory needs none
    r".*`srun` command is available on your system but is not used.*",  # the start line says what was detected
    r".*is smaller than the logging interval.*",
    r".*your dataloader is not resumable.*",  # project.sampling resumes it
    r".*No seed found.*",
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning of torch
    r".*JsonargparseDeprecationWarning.*",  # Lightning of jsonargparse
    r".*JSONARGPARSE_DEPRECATION_WARNINGS.*",
    r".*was deprecated in v4.*will be removed in v5.*",
    r".*Checkpoint directory .* exists and is not empty.*",
)


def quieten() -> None:
    """Silences them. Warnings that a person can act on still come through."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
