"""Digests of the source files that a process runs."""

import hashlib
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import rankzero
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.messages import is_in_package

MAX_FILES = 2000
"""How many of the user's files are compared."""


def user_code() -> dict[str, str]:
    """Returns the digest of the source file of each imported module outside of libraries, by module name.

    The included models and data modules count as the user's code. At most `MAX_FILES` files are read.
    """
    sources = {name: _source_of(module) for name, module in sorted(sys.modules.items())}
    own = [(name, file) for name, file in sources.items() if _is_compared(file)]
    return digests(dict(own[:MAX_FILES]))


def _source_of(module: object) -> Path:
    """Returns the source file of a module without loading a lazy module; an empty path if it has none."""
    if not isinstance(module, ModuleType):
        return Path()
    return Path(str(object.__getattribute__(module, "__dict__").get("__file__") or ""))


def _is_compared(file: Path) -> bool:
    """Whether a file is Python source of the user. An installed command has no suffix: it names its environment."""
    if file.suffix != ".py":
        return False
    return is_in_package(file, "lightning_modules", "data_modules") or is_user_file(str(file))


def rankzero_code() -> dict[str, str]:
    """Returns the digest of each source file of the package `rankzero`, by path."""
    folder = Path(str(rankzero.__file__)).parent
    return digests({f"rankzero/{file.relative_to(folder)}": file for file in folder.rglob("*.py")})


@cache
def rankzero_digest() -> str:
    """Returns one digest of `rankzero_code`, which is computed once per process."""
    return combined(rankzero_code())


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the first 12 digits of the sha256 of each file; files that cannot be read are left out."""
    found = {}
    for name, file in files.items():
        try:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        except OSError:
            continue
    return found


def combined(parts: Mapping[str, str]) -> str:
    """Returns one digest of several."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:12]
