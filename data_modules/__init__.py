"""LightningDataModules for `--data`, each imported on first use.

`__all__` lists the short names that `--data` accepts.
"""

from importlib import import_module
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)  # a folder of this name elsewhere on sys.path extends this package

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
