"""Shortens the import of torch and Lightning, which takes seconds, by a third. Does not import either.

Afterwards, the same modules are available as after plain imports.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SIGNAL = "scipy.signal"
"""Takes 1.4 to 2 s of a start of 6 s. torchmetrics (1.9) only restores its `hamming`, for the package srmrpy."""

PLOT = "torchmetrics.utilities.plot"
"""Imports matplotlib (0.5 s of such a start), which only `Metric.plot` needs."""


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speeds up the imports in its `with` block; does nothing if torch is already imported."""
    if "torch" in sys.modules:
        yield
        return
    with _without_garbage_collection(), _delayed(SIGNAL), _delayed(PLOT):
        yield


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection during the imports, then exempts the imported objects from later collections.

    Imports create hundreds of thousands of objects and hardly any garbage; Python would scan all of them many times.
    After `gc.freeze`, later collections skip them and interrupt steps for less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _delayed(module: str) -> Iterator[None]:
    """Delays the import of a module until it is used, or imported after the block."""
    package = module.partition(".")[0]
    if module in sys.modules or find_spec(package) is None or (module == SIGNAL and find_spec("srmrpy")):
        yield
        return
    sys.modules[module] = placeholder = _Placeholder(module)
    if module == SIGNAL:
        vars(import_module(package))["signal"] = placeholder
    try:
        yield
    finally:
        placeholder.remove()


class _Placeholder(ModuleType):
    """Placeholder for a module, which imports the module when it is used."""

    hamming = None

    def remove(self) -> None:
        """Removes the placeholder, so that the next import loads the module."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if vars(sys.modules.get(package, self)).get(name) is self:
            delattr(sys.modules[package], name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` reads such attributes of every imported module
            raise AttributeError(name)
        if self.__name__ == PLOT:  # read when metrics are imported: types in annotations, and functions
            return object if name.isupper() else partial(self._call, name)
        self.remove()
        return getattr(import_module(self.__name__), name)

    def _call(self, name: str, /, *arguments: Any, **settings: Any) -> Any:
        self.remove()
        return getattr(import_module(self.__name__), name)(*arguments, **settings)
