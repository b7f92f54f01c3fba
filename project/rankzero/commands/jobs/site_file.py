"""Reads the defaults of a site from a YAML file. Does not import torch."""

from pathlib import Path
from typing import Any

import yaml

from rankzero.commands.jobs.options import FLAGS, LISTS, SUBMIT_FLAGS, add_value
from rankzero.distributed.process.config_folder import config_folder
from rankzero.messages import RequestError, nearest


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
            names = ", ".join(flag.name for flag in SUBMIT_FLAGS)
            instead = nearest(str(key), FLAGS) or "partition"
            raise RequestError(f"{file}: {key}", f"there is no such key; the keys are {names}", f"{instead}: ...")
        flag = FLAGS[key]
        for item in value if isinstance(value, list) and flag.name in LISTS else [value]:
            if not isinstance(item, str):
                raise RequestError(f"{file}: {key}", "the value is not a text", f"{key}: {flag.example}")
            if item:
                try:
                    add_value(values, flag, item)
                except RequestError as error:
                    raise RequestError(f"{file}: {key}: {item}", error.found, f"{key}: {flag.example}") from None
    return values


def _users_file() -> Path | None:
    """Returns the user's own site file, if it exists."""
    folder = config_folder()
    return folder / "site.yaml" if folder and (folder / "site.yaml").is_file() else None
