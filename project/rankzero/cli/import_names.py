"""Makes a user's packages with the names of Rankzero's packages usable. Does not import torch."""

import sys
from importlib import import_module
from pathlib import Path
from pkgutil import extend_path

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


def hidden_file(module: str) -> str | None:
    """Returns the user's file that cannot be imported because Rankzero has a module of that name; None without one."""
    top, _, rest = module.partition(".")
    if top not in PACKAGES or not rest:
        return None
    own, *others = (Path(folder, *rest.split(".")).with_suffix(".py") for folder in import_module(top).__path__)
    hidden = [file for file in others if own.is_file() and file.is_file() and not file.samefile(own)]
    return str(hidden[0]) if hidden else None
