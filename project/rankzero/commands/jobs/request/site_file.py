"""Reads the defaults of a site from a YAML file. Does not import torch."""

import os
from pathlib import Path
from typing import Any

import yaml

from rankzero.commands.jobs.request.options import FLAGS, LISTS, SUBMIT_FLAGS, add_value
from rankzero.distributed.process.config_folder import config_folder
from rankzero.messages import RequestError, nearest

_PATHS = ("root", "venv", "hostfile", "image")
"""Keys whose values may contain variables."""


def read_site(path: str | None) -> dict[str, Any]:
    """Reads a site file: YAML with the names of flags as keys.

    Args:
        path: The file; None for the user's own, which may be missing.

    Returns:
        Flag -> its value.

    Raises:
        RequestError: The file cannot be read, or has an unknown key or an invalid value.
    """
    file = _users_file() if path is None else Path(path)
    if file is None:
        return {}
    try:
        # All values are text, as on the command line. YAML's own types would read `no` as False and `0123` as 83.
        content = yaml.load(file.read_text(), Loader=yaml.BaseLoader) or {}
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--site {file}", f"cannot read this file: {reason}", "--site FILE") from None
    except yaml.YAMLError as error:
        raise RequestError(f"--site {file}", f"not YAML: {error}", "scheduler: slurm") from None
    if not isinstance(content, dict):
        raise RequestError(f"--site {file}", "not a YAML mapping", "scheduler: slurm")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in FLAGS:
            names = [flag.name for flag in SUBMIT_FLAGS]
            similar = nearest(str(key), names)
            found = f"there is no such key; the keys are {', '.join(names)}"
            raise RequestError(f"{file}: {key}", found, f"{similar}: ..." if similar else "remove this line")
        for item in value if isinstance(value, list) and FLAGS[key].name in LISTS else [value]:
            _add(values, key, item, file)
    return values


def _add(values: dict[str, Any], key: str, item: object, file: Path) -> None:
    """Adds a value of the file to the values of a flag."""
    flag = FLAGS[key]
    instead = f"- {flag.example}".replace("'", '"') if flag.name in LISTS else f"{key}: {flag.example}"
    if not isinstance(item, str) or not item:
        found = "the value is empty; a value that begins with # needs quotes" if not item else "the value is not text"
        raise RequestError(f"{file}: {key}", found, instead)
    try:
        add_value(values, flag, _expanded(item) if flag.name in _PATHS else item)
    except RequestError as error:
        raise RequestError(f"{file}: {key}: {item}", error.found, instead) from None


def _expanded(path: str) -> str:
    """Returns a path with variables expanded, as a shell does on the command line.

    Raises:
        RequestError: A variable is not set.
    """
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise RequestError(path, "a variable in this path is not set", path)
    return expanded


def _users_file() -> Path | None:
    """Returns the user's own site file, if it exists."""
    folder = config_folder()
    return folder / "site.yaml" if folder and (folder / "site.yaml").is_file() else None
