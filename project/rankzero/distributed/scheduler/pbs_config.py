"""Settings of the PBS installation on this machine. Does not import torch."""

import os
from pathlib import Path


def pbs_setting(name: str) -> str | None:
    """Returns a setting in pbs.conf, such as `PBS_EXEC`; None without the file or the setting.

    The path of the file is in PBS_CONF_FILE, by default /etc/pbs.conf (OpenPBS 23.06).
    """
    try:
        lines = Path(os.environ.get("PBS_CONF_FILE") or "/etc/pbs.conf").read_text().splitlines()
    except (OSError, UnicodeError):
        return None
    settings = dict(line.strip().partition("=")[::2] for line in lines)
    return settings.get(name) or None
