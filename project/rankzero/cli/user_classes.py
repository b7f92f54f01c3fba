"""Classes of the user: where their modules are found, and messages about those that cannot be used."""

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.messages import RequestError, few, nearest

if TYPE_CHECKING:
    from rankzero.cli.arguments import Origins


def unknown_class_error(flag: str, text: str, names: Sequence[str]) -> RequestError:
    """Returns the message for a `--model` or `--data` that is neither one of the short names nor a class path.

    If the user's value names a file, a module or a class of the current folder, its class path is suggested.
    """
    classes = classes_named(text)
    if text.endswith(".py"):
        is_file = os.path.isfile(text)  # noqa: PTH113 - `Path` raises an error if the name is too long
        found = f"{text} is a file, not a class path" if is_file else "there is no such file"
    else:
        found = f"there is no {flag} of that name; choose {', '.join(names)}, or a class path"
    if classes:
        found += f"; classes in this folder: {', '.join(classes)}"
    instead = f"--{flag} {classes[0] if classes else nearest(text, names) or names[0]}"
    if flag == "model" and (resnet := re.fullmatch(r"resnet[-_]?(10|18|34|50|101|152)", text.lower())):
        instead = f"--model ResNet --model.depth {resnet[1]}"
    return RequestError(f"--{flag} {text}", found, instead)


def classes_named(text: str) -> list[str]:
    """Returns the class paths in the current folder that the name of a file, module or class may mean."""
    file = Path(text if text.endswith(".py") else f"{text}.py")
    if os.path.isfile(file) and not file.is_absolute() and ".." not in file.parts:  # noqa: PTH113
        return [f"{'.'.join(file.with_suffix('').parts)}.{name}" for name in _classes_in(file)]
    return [f"{file.stem}.{text}" for file in sorted(Path().glob("*.py")) if text in _classes_in(file)]


def _classes_in(file: Path) -> list[str]:
    """Returns the names of the classes that a file defines, without importing it."""
    try:
        return re.findall(r"^class (\w+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return []


def import_failure(requested: str, error: BaseException | None) -> RequestError | None:
    """Returns the message for an error in a user's module; None if the error arose elsewhere."""
    for cause in reversed(list(_causes(error))):
        if isinstance(cause, ImportError) and (file := hidden_file(cause.name or "")):
            return hidden_file_error(requested, cause.name or "", file)
        if (location := _location(cause)) is None:
            continue
        file, line = location
        text = (linecache.getline(file, line) or "").strip()
        path = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
        message = cause.msg if isinstance(cause, SyntaxError) else cause
        found = f"{path}, line {line}" + f": {text}" * bool(text) + f"\n{type(cause).__name__}: {message}"
        missing_package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        remedy = f"installing {missing_package} in this environment or correcting its import"
        remedy = remedy if missing_package else f"correcting {path}"
        return RequestError(requested, found, f"the same command, after {remedy}")
    return None


def hidden_file_error(requested: str, module: str, file: str) -> RequestError:
    """Returns the message for a user's file that one of Rankzero's modules hides."""
    found = f"{file} cannot be imported as {module}: Rankzero has a module of that name"
    instead = f"the same command, after renaming {Path(file).name}, also in the statements that import it"
    return RequestError(requested, found, instead)


def missing_class_error(requested: str, flag: str, class_path: str, base: type = object) -> RequestError | None:
    """Returns the message for a class that its module does not define, with subclasses of `base` that it defines.

    Returns None if the module is not imported, or has an attribute of that name.
    """
    module, _, name = class_path.rpartition(".")
    if module not in sys.modules or hasattr(sys.modules[module], name):
        return None
    if module in PACKAGES:
        similar = nearest(name, sys.modules[module].__all__)
        found = f"{module} has no class {name}; a class in your own folder {module} needs the name of its file"
        return RequestError(requested, found, f"--{flag} {similar or f'{module}.FILE.{name}'}")
    names = [name for name in classes_defined_in(module, base) if name[0] != "_"]
    defined = few(names, 12) or f"no {base.__name__}"
    best = nearest(name, names) or next(iter(names), None)
    instead = f"--{flag} {module}.{best}" if best else f"the class path of a {base.__name__}"
    return RequestError(requested, f"{module} has no class {name}; it defines {defined}", instead)


def classes_defined_in(module: str, base: type) -> list[str]:
    """Returns the names of the subclasses of `base` that an imported module defines."""
    classes = [one for one in vars(sys.modules[module]).values() if isinstance(one, type) and one.__module__ == module]
    return [one.__name__ for one in classes if issubclass(one, base)]


def missing_requirement_error(error: ValueError, config: Mapping[str, Any], origins: "Origins") -> RequestError | None:
    """Returns the message for a class, such as WandbLogger, whose package is not installed; None for another error."""
    causes = [str(cause) for cause in _causes(error)]
    install = next((match[1] for text in causes if (match := re.search("pip install (?:-U )?([^`\n]+)`", text))), None)
    path = next((match[1] for text in causes if (match := re.search("class_path '([^']+)'", text))), "")
    if install is None:
        return None
    key = next((key.removesuffix(".class_path") for key, value in config.items() if value == path), "trainer")
    found = f"{path.rpartition('.')[2]} requires {install.strip(chr(39))}, which is not installed"
    return RequestError(origins.request_for(key), found, f"pip install {install}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _location(error: BaseException) -> tuple[str, int] | None:
    """Returns file and line of the innermost frame in the user's code, or of a syntax error; None without either."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else None


PACKAGES = ("data_modules", "lightning_modules")
"""Rankzero's packages whose names a user's packages may have too."""

CHECKOUT = Path(__file__).resolve().parents[3]
"""Folder that contains `launch/` and Rankzero's packages, if Rankzero runs from a checkout."""

SOURCES = (str(CHECKOUT), str(CHECKOUT / "project")) if (CHECKOUT / "launch" / "fit.py").is_file() else ()
"""Entries that `launch/*.py` adds to `sys.path`; empty if Rankzero is installed."""


def extend_packages() -> None:
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
