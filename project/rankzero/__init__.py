"""Rankzero: Lightning's Trainer for any launcher, with exact resume. Does not import torch."""

from rankzero.distributed.process import interrupts as _interrupts  # noqa: F401  (before all other imports)

# isort: split
from typing import TYPE_CHECKING, Any

from rankzero.distributed.process import at_exit, lightning_names
from rankzero.distributed.process.spawn import START_FOLDER as _START_FOLDER  # noqa: F401  (recorded by this import)
from rankzero.training.saved_state import from_directory

if TYPE_CHECKING:
    from rankzero.messages import Stopped
    from rankzero.trainer import Trainer

__version__ = "0.2.0"

at_exit.install()
lightning_names.install()
from_directory.install()

__all__ = ["Stopped", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from rankzero.trainer import Trainer

        return Trainer
    if name == "Stopped":
        from rankzero.messages import Stopped

        return Stopped
    raise AttributeError(f"module 'rankzero' has no attribute {name!r}")
