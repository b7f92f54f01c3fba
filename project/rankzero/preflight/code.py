"""Digests of the source files that a process runs."""

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import rankzero
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.messages import is_in_package

_SCRIPTS = sysconfig.get_path("scripts")
"""Folder of installed commands, whose first line names the virtual environment."""


def user_code() -> dict[str, str]:
    """Returns the digest of the source file of each imported module outside of libraries, by module name.

    The included models and data modules count as the user's code.
    """
    files = {name: getattr(module, "__file__", None) for name, module in sorted(sys.modules.items())}
    return digests({name: Path(file) for name, file in files.items() if isinstance(file, str) and _is_compared(file)})


def _is_compared(file: str) -> bool:
    is_included = is_in_package(Path(file), "lightning_modules", "data_modules")
    return is_included or (is_user_file(file) and not file.startswith(_SCRIPTS))


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
