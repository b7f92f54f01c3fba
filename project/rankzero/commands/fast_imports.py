"""Shortens the import of torch and Lightning, which takes seconds, by a third. Does not import either.

Afterwards, the same modules are available as after plain imports.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_DELAYED_MODULE = "scipy.signal"


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speeds up the imports in its `with` block; does nothing if torch is already imported."""
    if "torch" in sys.modules:
        yield
        return
    with _without_garbage_collection(), _delayed_scipy_signal():
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
def _delayed_scipy_signal() -> Iterator[None]:
    """Delays the import of `scipy.signal`, which torchmetrics (1.9) needs for a single assignment, until first use.

    The assignment restores `scipy.signal.hamming` for the package srmrpy. If srmrpy is installed, nothing is delayed.
    """
    if _DELAYED_MODULE in sys.modules or find_spec("scipy") is None or find_spec("srmrpy") is not None:
        yield
        return
    scipy, placeholder = import_module("scipy"), _Placeholder(_DELAYED_MODULE)
    sys.modules[_DELAYED_MODULE] = scipy.signal = placeholder  # type: ignore[attr-defined]
    try:
        yield
    finally:
        placeholder.remove_placeholder()


class _Placeholder(ModuleType):
    """Placeholder for a module; reading any attribute except `hamming` imports the real module."""

    hamming = None

    def remove_placeholder(self) -> None:
        """Removes the placeholder, so that the next import loads the module."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if vars(sys.modules[package]).get(name) is self:
            delattr(sys.modules[package], name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` reads such attributes of every imported module
            raise AttributeError(name)
        self.remove_placeholder()
        return getattr(import_module(self.__name__), name)
