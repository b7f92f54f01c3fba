"""What it learns from: LightningDataModules, imported only when one is used.

`__all__` is the list of short names that `--data` takes.
"""

from importlib import import_module
from typing import Any

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
