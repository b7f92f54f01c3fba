"""What it learns from: LightningDataModules, imported only when one is used.

`__all__` is the list of short names that `--data` takes.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)  # a user's folder of this name adds to it, instead of being hidden

_FILES = {
    "Toy": "toy",
    "Digits": "digits",
    "FashionMNIST": "fashion_mnist",
    "CIFAR10": "cifar10",
    "ImageFolder": "image_folder",
    "SyntheticImages": "synthetic_images",
}

__all__ = ["CIFAR10", "Digits", "FashionMNIST", "ImageFolder", "SyntheticImages", "Toy"]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
