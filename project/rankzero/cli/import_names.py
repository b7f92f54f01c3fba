"""Which module an import finds while a user's code runs. Imports no torch.

Tutorials import `pytorch_lightning`, and a user's folder may hold packages of the same names as ours. `install` lets
both work: in this process, and in every process that `multiprocessing` starts from it.
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

ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Packages that hold Lightning a second time -> the package that this trainer is built on."""

PACKAGES = ("data_modules", "lightning_modules")
"""Our packages whose names a user's own packages may have too."""

CHECKOUT = Path(__file__).resolve().parents[3]
"""The folder that holds `launch/` and our packages, where Rankzero runs from a checkout."""

SOURCES = (str(CHECKOUT), str(CHECKOUT / "project")) if (CHECKOUT / "launch" / "fit.py").is_file() else ()
"""What `launch/*.py` puts on the search path."""

_IN_CHILD = "rankzero_child"


def install() -> None:
    """Lets imports find `lightning.pytorch` as `pytorch_lightning`, our packages first, and the user's files in them.

    The folder that the command runs in is searched last, as it is by `python -m` first.
    """
    for name in PACKAGES:
        package = import_module(name)
        if not isinstance(vars(package).get("__getattr__"), _UserAttributes):
            package.__getattr__ = _UserAttributes(package)  # type: ignore[method-assign]
    # `launch/` would hide a user's `evaluate`, and the checkout a user's `benchmarks` and `tests`.
    hidden = {*SOURCES, str(CHECKOUT / "launch")} if SOURCES else set()
    sys.path[:] = [entry for entry in sys.path if entry not in hidden]
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if _LIGHTNING_ALIAS not in sys.meta_path:
        for name in [name for name in sys.modules if name.partition(".")[0] in ALIASES]:
            del sys.modules[name]  # a second Lightning, whose classes this trainer does not know
        sys.meta_path.insert(0, _LIGHTNING_ALIAS)
    if _USER_MODULES not in sys.meta_path:
        sys.meta_path.append(_USER_MODULES)
    # A process is pickled in the order of its attributes, `_config` before what it is to run (CPython 3.10 to 3.14).
    multiprocessing.current_process()._config["rankzero"] = INSTALL_IN_CHILD  # type: ignore[attr-defined]


def hidden_file(module: str) -> str | None:
    """Returns the user's file that cannot be imported because a module of ours has its name; None without one."""
    top, _, rest = module.partition(".")
    if top not in PACKAGES or not rest:
        return None
    try:
        if not _is_ours(sys.modules.get(module) or find_spec(module)):
            return None
    except (ImportError, ValueError):  # a parent of the module does not exist
        return None
    spec = _USER_MODULES.find_spec(module)
    return spec.origin if spec else None


class LightningAlias:
    """Finds the modules of `ALIASES`: under both names it is the same module object."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns a specification whose loader returns the module of the other name."""
        if fullname.partition(".")[0] not in ALIASES or (found := find_spec(_real_name(fullname))) is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)  # type: ignore[arg-type]  # importlib.abc is slow to import
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Imports the module of the other name; Python makes an empty one for a moment."""
        import_module(_real_name(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Puts the real module in the place of the empty one, as Python lets a module do, and leaves it unchanged."""
        name = module.__name__
        sys.modules[name] = sys.modules[_real_name(name)]


class UserModules:
    """Finds the user's modules in packages of the same names as ours, where ours hold no such module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Looks for a submodule in all folders of the package's name on the search path."""
        top, _, rest = fullname.partition(".")
        if top not in PACKAGES or not rest:
            return None
        parents = rest.split(".")[:-1]
        packages = [folder for spec in user_packages(top) for folder in spec.submodule_search_locations or ()]
        folders = [str(Path(folder, *parents)) for folder in packages]
        return PathFinder.find_spec(fullname, folders)


def user_packages(name: str) -> Iterator[ModuleSpec]:
    """The packages on the search path that have the name of one of ours."""
    for entry in dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path):
        spec = PathFinder.find_spec(name, [entry])
        if spec and spec.submodule_search_locations and not _is_ours(spec):
            yield spec


class _UserAttributes:
    """A package's `__getattr__`: its own names, then those of the user's `__init__.py` in a package of the same name.

    Args:
        package: Our package.
    """

    def __init__(self, package: ModuleType) -> None:
        self.name = package.__name__
        self.own: Callable[[str], Any] | None = vars(package).get("__getattr__")
        self.users: list[ModuleType] = []
        self.searched = False

    def __call__(self, name: str) -> Any:
        if self.own:
            try:
                return self.own(name)
            except AttributeError:
                pass
        if not name.startswith("__"):
            for module in self._modules():
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"module {self.name!r} has no attribute {name!r}")

    def _modules(self) -> Sequence[ModuleType]:
        if not self.searched:
            self.searched = True  # the user's file may import from its own package
            try:
                for spec in user_packages(self.name):
                    if spec.loader and spec.origin:
                        self.users.append(module_from_spec(spec))
                        spec.loader.exec_module(self.users[-1])
            except BaseException:
                self.users, self.searched = [], False
                raise
        return self.users


class _InstallInChild:
    """An object whose unpickling, in a process that multiprocessing has just started, calls `install` there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (_Run(), "INSTALL_IN_CHILD")


class _Run:
    """Is unpickled as what this file defines: by path, as `rankzero` need not be on the search path there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (__file__, None, _IN_CHILD)


def _real_name(alias: str) -> str:
    top, dot, rest = alias.partition(".")
    return ALIASES[top] + dot + rest


def _is_ours(module: Any) -> bool:
    """Whether a module or a specification is of a file in our packages."""
    ours = [Path(str(sys.modules[name].__file__)).resolve().parent for name in PACKAGES if name in sys.modules]
    origin = getattr(module, "origin", None) or getattr(module, "__file__", None)
    if origin:
        return any(folder in Path(origin).resolve().parents for folder in ours)
    folders = getattr(module, "submodule_search_locations", None) or ()
    return any(Path(folder).resolve() in ours for folder in folders)


_LIGHTNING_ALIAS = LightningAlias()
_USER_MODULES = UserModules()
INSTALL_IN_CHILD: Any = _InstallInChild()

if __name__ == _IN_CHILD:
    sys.path[:0] = SOURCES
    _module = import_module("rankzero.cli.import_names")
    _module.install()
    INSTALL_IN_CHILD = _module.INSTALL_IN_CHILD
