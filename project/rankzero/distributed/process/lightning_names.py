"""Makes two copies of one package, `pytorch_lightning` and `lightning.pytorch`, the same modules."""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rankzero.messages import RequestError

ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Package with a second copy of Lightning -> the package that Rankzero imports."""


def install() -> None:
    """Makes imports find the modules of one copy under the names of both, also where one copy is not installed.

    The copy is `lightning.pytorch`, unless the program has imported `pytorch_lightning` of the same version before. If
    the program has imported both, or another version, they stay two packages.
    """
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    names: Mapping[str, str] = ALIASES
    if (copy := sys.modules.get("pytorch_lightning")) is not None:
        from importlib.metadata import version  # slow to import

        is_usable = "lightning.pytorch" not in sys.modules and copy.__version__ == version("lightning")
        names = {name: alias for alias, name in ALIASES.items()} if is_usable else {}
    sys.meta_path.insert(0, AliasFinder(names))


def real_name(module: str) -> str:
    """Returns the real name of one of Lightning's modules in this program, which its logger has too."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, AliasFinder)), None)
    return (finder and finder.real_name(module)) or module


def check_base(requested: str, kind: type) -> None:
    """Checks that the base classes of a class are not those of a second copy of Lightning.

    Raises:
        RequestError: The program has imported both copies, or `pytorch_lightning` of another version.
    """
    parents = {parent.__module__.partition(".")[0] for parent in kind.__mro__}
    copy = next((name for name in ALIASES if name in parents), None)
    if copy and sys.modules.get(copy) is not sys.modules.get(ALIASES[copy]):
        found = f"{kind.__qualname__} uses the package {copy}, and Rankzero uses {ALIASES[copy]}, a second copy of it"
        raise RequestError(requested, found, f"import rankzero before {copy}, which then is {ALIASES[copy]}")


class AliasFinder:
    """Finder for second names of packages; both names of a module refer to the same module object.

    Args:
        names: Second name of a package -> its real name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def real_name(self, module: str) -> str | None:
        """Returns the real name of a module; None for a module without a second name."""
        for alias, package in self.names.items():
            if module == alias or module.startswith(f"{alias}."):
                return package + module.removeprefix(alias)
        return None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns a specification that loads the real module; None for other modules."""
        if (real_name := self.real_name(fullname)) is None or (real_spec := find_spec(real_name)) is None:
            return None
        spec = ModuleSpec(fullname, self, origin=real_spec.origin)  # type: ignore[arg-type]  # importlib.abc is slow to import
        spec.submodule_search_locations = real_spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Imports the real module; returns None, so Python creates an empty module that `exec_module` replaces."""
        import_module(self.real_name(spec.name) or "")

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the empty module by the unchanged real one; Python lets a module replace itself in `sys.modules`."""
        sys.modules[module.__name__] = sys.modules[self.real_name(module.__name__) or ""]
