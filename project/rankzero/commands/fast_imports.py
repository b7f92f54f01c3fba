"""Importing torch and Lightning takes seconds, of which a third can be saved. Imports neither.

What is imported is the same, and is there in the end for whoever asks for it.
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
    """For what is imported within it, once a process; where torch is there already nothing is left to be saved."""
    if "torch" in sys.modules:
        yield
        return
    with _no_search_for_garbage(), _scipy_signal_when_used():
        yield


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Modules make hundreds of thousands of objects and hardly any garbage; Python would search all of them many times.

    `gc.freeze` keeps them out of later searches too, which would interrupt steps. In the end they are let go as ever:
    libraries count what is left then, and complain.
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
    """Leaves out `scipy.signal`, which torchmetrics (1.9) imports for a single assignment.

    It gives back to it the function `hamming`, which the package srmrpy looks for there. So where that is installed,
    all is as ever.
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
    """Stands where a module will be; whoever asks it for anything but `hamming` gets it from that module."""

    hamming = None

    def make_way(self) -> None:
        """From now on an import brings the module itself."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if vars(sys.modules[package]).get(name) is self:
            delattr(sys.modules[package], name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` looks at every module there is
            raise AttributeError(name)
        self.make_way()
        return getattr(import_module(self.__name__), name)
