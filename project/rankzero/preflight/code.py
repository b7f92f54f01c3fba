"""Digests of the source files that a process runs."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from rankzero.distributed.process.user_traceback import OWN_PACKAGES, is_user_file

MAX_FILES = 2000
"""How many of the user's files are compared."""


def user_code() -> dict[str, str]:
    """Returns the digest of the source file of each imported module that belongs to the user, by module name."""
    files = {name: getattr(module, "__file__", None) for name, module in sorted(sys.modules.items())}
    own = {name: Path(file) for name, file in files.items() if isinstance(file, str) and is_user_file(file)}
    return dict(list(digests(own).items())[:MAX_FILES])


def rankzero_code() -> dict[str, str]:
    """Returns the digest of each source file of Rankzero, and of its models and data modules if they are imported."""
    return digests(
        {
            f"{name}/{file.relative_to(folder)}": file
            for name in OWN_PACKAGES
            if name in sys.modules
            for folder in [Path(str(sys.modules[name].__file__)).parent]
            for file in folder.rglob("*.py")
        }
    )


@cache
def rankzero_digest() -> str:
    """Returns one digest of `rankzero_code`, which is computed once per process."""
    return combined(rankzero_code())


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the first 12 digits of the sha256 of each file; files that cannot be read are left out."""
    return {name: hashlib.sha256(content).hexdigest()[:12] for name, content in _readable(files.items())}


def combined(parts: Mapping[str, str]) -> str:
    """Returns one digest of several."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:12]


def _readable(files: Iterable[tuple[str, Path]]) -> Iterable[tuple[str, bytes]]:
    for name, file in files:
        try:
            yield name, file.read_bytes()
        except OSError:
            continue
