"""Shortens the import of torch and Lightning, which takes seconds, by a third. Does not import either.

Afterwards, the same modules are available as after plain imports.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NEVER_USED = "scipy.signal"


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speeds up the imports in its `with` block; does nothing if torch is already imported."""
    if "torch" in sys.modules:
        yield
        return
    with _no_search_for_garbage(), _scipy_signal_when_used():
        yield


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Disables garbage collection during the imports, then exempts the imported objects from later collections.

    Imports create hundreds of thousands of objects and hardly any garbage; Python would scan all of them many times.
    After `gc.freeze`, later collections skip them and interrupt steps for less time. `gc.unfreeze` runs at exit,
    because libraries count the remaining objects then and print warnings.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if searches:
            gc.enable()


@contextmanager
def _scipy_signal_when_used() -> Iterator[None]:
    """Delays the import of `scipy.signal`, which torchmetrics (1.9) needs for a single assignment, until first use.

    The assignment restores `scipy.signal.hamming` for the package srmrpy. If srmrpy is installed, nothing is delayed.
    """
    if _NEVER_USED in sys.modules or find_spec("scipy") is None or find_spec("srmrpy") is not None:
        yield
        return
    scipy, later = import_module("scipy"), _Later(_NEVER_USED)
    sys.modules[_NEVER_USED] = scipy.signal = later  # type: ignore[attr-defined]
    try:
        yield
    finally:
        later.make_way()


class _Later(ModuleType):
    """Placeholder for a module; reading any attribute except `hamming` imports the real module."""

    hamming = None

    def make_way(self) -> None:
        """Removes the placeholder, so that the next import loads the module."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if vars(sys.modules[package]).get(name) is self:
            delattr(sys.modules[package], name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` reads such attributes of every imported module
            raise AttributeError(name)
        self.make_way()
        return getattr(import_module(self.__name__), name)
