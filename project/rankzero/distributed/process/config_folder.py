"""Folder of the user's Rankzero settings. Does not import torch."""

import os
from pathlib import Path


def config_folder() -> Path | None:
    """Returns the user's folder for Rankzero (XDG base directories); None if the user has no home directory."""
    for base, *subfolders in (("XDG_CONFIG_HOME",), ("HOME", ".config")):
        folder = Path(os.environ.get(base) or "")
        if folder.is_absolute():
            return folder.joinpath(*subfolders, "rankzero")
    return None
