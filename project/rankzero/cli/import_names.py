"""Makes a user's packages with the names of Rankzero's packages usable. Does not import torch."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType
from typing import Any

PACKAGES = ("data_modules", "lightning_modules")
"""Rankzero's packages whose names a user's packages may have too."""

CHECKOUT = Path(__file__).resolve().parents[3]
"""Folder that contains `launch/` and Rankzero's packages, if Rankzero runs from a checkout."""

SOURCES = (str(CHECKOUT), str(CHECKOUT / "project")) if (CHECKOUT / "launch" / "fit.py").is_file() else ()
"""Entries that `launch/*.py` adds to `sys.path`; empty if Rankzero is installed."""


def install() -> None:
    """Makes imports find the user's modules in Rankzero's packages.

    Rankzero's modules take precedence, and the current folder is searched last; `python -m` searches it first. A
    process that `multiprocessing` starts has this search path too, with which the packages extend themselves.
    """
    if SOURCES:  # `launch/` would hide a user's module `evaluate`
        sys.path[:] = [entry for entry in sys.path if entry != str(CHECKOUT / "launch")]
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    for name in PACKAGES:
        package = import_module(name)
        package.__path__ = extend_path(package.__path__, name)
        if not isinstance(vars(package).get("__getattr__"), _UserAttributes):
            package.__getattr__ = _UserAttributes(package)  # type: ignore[method-assign]


def hidden_file(module: str) -> str | None:
    """Returns the user's file that cannot be imported because Rankzero has a module of that name; None without one."""
    top, _, rest = module.partition(".")
    if top not in PACKAGES or not rest:
        return None
    own, *others = (Path(folder, *rest.split(".")).with_suffix(".py") for folder in import_module(top).__path__)
    hidden = [file for file in others if own.is_file() and file.is_file() and not file.samefile(own)]
    return str(hidden[0]) if hidden else None


class _UserAttributes:
    """A package's `__getattr__`: finds Rankzero's names, then names in the user's packages of the same name."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package
        self.own_getattr: Callable[[str], Any] = vars(package)["__getattr__"]
        self.user_modules: list[ModuleType] | None = None

    def __call__(self, name: str) -> Any:
        try:
            return self.own_getattr(name)
        except AttributeError:
            modules = [] if name.startswith("__") else self._modules()
            for module in modules:
                if name in vars(module):
                    return vars(module)[name]
            raise

    def _modules(self) -> list[ModuleType]:
        if self.user_modules is None:
            self.user_modules = []  # set first, because the user's file may import from its own package
            try:
                for file in (Path(folder, "__init__.py") for folder in self.package.__path__[1:]):
                    spec = spec_from_file_location(self.package.__name__, file) if file.is_file() else None
                    if spec and spec.loader:
                        self.user_modules.append(module_from_spec(spec))
                        spec.loader.exec_module(self.user_modules[-1])
            except BaseException:
                self.user_modules = None
                raise
        return self.user_modules
