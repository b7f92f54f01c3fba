"""What is learned: LightningModules, imported only when one is used.

`__all__` is the list of short names that `--model` takes.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)  # a user's folder of this name adds to it, instead of being hidden

_FILES = {"MLP": "mlp", "ResNet": "resnet"}

__all__ = ["MLP", "ResNet"]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
