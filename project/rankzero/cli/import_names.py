"""Import hooks for the user's code. Does not import torch.

A user's folder may contain packages with the names of Rankzero's packages. `install` makes both usable in this process
and in every process that `multiprocessing` starts from it.
"""

import multiprocessing
import operator
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("data_modules", "lightning_modules")
"""Rankzero's packages whose names a user's packages may have too."""

CHECKOUT = Path(__file__).resolve().parents[3]
"""Folder that contains `launch/` and Rankzero's packages, if Rankzero runs from a checkout."""

SOURCES = (str(CHECKOUT), str(CHECKOUT / "project")) if (CHECKOUT / "launch" / "fit.py").is_file() else ()
"""Entries that `launch/*.py` adds to `sys.path`; empty if Rankzero is installed."""

_CHILD_RUN_NAME = "rankzero_child"


def install() -> None:
    """Makes imports find the user's modules in Rankzero's packages.

    Rankzero's modules take precedence, and the current folder is searched last; `python -m` searches it first.
    """
    for name in PACKAGES:
        package = import_module(name)
        if not isinstance(vars(package).get("__getattr__"), _UserAttributes):
            package.__getattr__ = _UserAttributes(package)  # type: ignore[method-assign]
    # `launch/` would hide a user's module `evaluate`; the checkout would hide a user's `benchmarks` and `tests`.
    removed_entries = {*SOURCES, str(CHECKOUT / "launch")} if SOURCES else set()
    sys.path[:] = [entry for entry in sys.path if entry not in removed_entries]
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if _USER_MODULE_FINDER not in sys.meta_path:
        sys.meta_path.append(_USER_MODULE_FINDER)
    # A process is pickled attribute by attribute: `_config`, hence `install`, before the target (CPython 3.10 to 3.14).
    multiprocessing.current_process()._config["rankzero"] = INSTALL_IN_CHILD  # type: ignore[attr-defined]


def hidden_file(module: str) -> str | None:
    """Returns the user's file that cannot be imported because Rankzero has a module of that name; None without one."""
    top, _, rest = module.partition(".")
    if top not in PACKAGES or not rest:
        return None
    try:
        if not _is_rankzero_module(sys.modules.get(module) or find_spec(module)):
            return None
    except (ImportError, ValueError):  # a parent of the module does not exist
        return None
    spec = _USER_MODULE_FINDER.find_spec(module)
    return spec.origin if spec else None


class UserModuleFinder:
    """Finder for the user's modules in packages with the names of Rankzero's, where Rankzero has no such module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Searches the user's packages of the same name on the search path for a submodule."""
        top, _, rest = fullname.partition(".")
        if top not in PACKAGES or not rest:
            return None
        parents = rest.split(".")[:-1]
        packages = [folder for spec in user_packages(top) for folder in spec.submodule_search_locations or ()]
        folders = [str(Path(folder, *parents)) for folder in packages]
        return PathFinder.find_spec(fullname, folders)


def user_packages(name: str) -> Iterator[ModuleSpec]:
    """Yields the packages of this name on the search path, except Rankzero's."""
    for entry in dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path):
        spec = PathFinder.find_spec(name, [entry])
        if spec and spec.submodule_search_locations and not _is_rankzero_module(spec):
            yield spec


class _UserAttributes:
    """A package's `__getattr__`: finds Rankzero's names, then names in the user's packages of the same name.

    Args:
        package: Rankzero's package.
    """

    def __init__(self, package: ModuleType) -> None:
        self.name = package.__name__
        self.own_getattr: Callable[[str], Any] | None = vars(package).get("__getattr__")
        self.user_modules: list[ModuleType] = []
        self.has_searched = False

    def __call__(self, name: str) -> Any:
        if self.own_getattr:
            try:
                return self.own_getattr(name)
            except AttributeError:
                pass
        if not name.startswith("__"):
            for module in self._modules():
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"module {self.name!r} has no attribute {name!r}")

    def _modules(self) -> Sequence[ModuleType]:
        if not self.has_searched:
            self.has_searched = True  # set first, because the user's file may import from its own package
            try:
                for spec in user_packages(self.name):
                    if spec.loader and spec.origin:
                        self.user_modules.append(module_from_spec(spec))
                        spec.loader.exec_module(self.user_modules[-1])
            except BaseException:
                self.user_modules, self.has_searched = [], False
                raise
        return self.user_modules


class _InstallInChild:
    """Object that calls `install` when it is unpickled in a process that multiprocessing has just started."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (_FileGlobals(), "INSTALL_IN_CHILD")


class _FileGlobals:
    """Object whose unpickling runs this file by path and returns its globals; `rankzero` may not be importable yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (__file__, None, _CHILD_RUN_NAME)


def _is_rankzero_module(module: Any) -> bool:
    """Returns whether a module or a specification refers to a file in Rankzero's packages."""
    rankzero_folders = [
        Path(str(sys.modules[name].__file__)).resolve().parent for name in PACKAGES if name in sys.modules
    ]
    origin = getattr(module, "origin", None) or getattr(module, "__file__", None)
    if origin:
        return any(folder in Path(origin).resolve().parents for folder in rankzero_folders)
    folders = getattr(module, "submodule_search_locations", None) or ()
    return any(Path(folder).resolve() in rankzero_folders for folder in folders)


_USER_MODULE_FINDER = UserModuleFinder()
INSTALL_IN_CHILD: Any = _InstallInChild()

if __name__ == _CHILD_RUN_NAME:
    sys.path[:0] = SOURCES
    _module = import_module("rankzero.cli.import_names")
    _module.install()
    INSTALL_IN_CHILD = _module.INSTALL_IN_CHILD
