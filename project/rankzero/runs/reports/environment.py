"""Describes how an attempt was started and the machines, devices and versions that it runs with."""

import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch

from rankzero import __version__
from rankzero.distributed.process.spawn import own_command
from rankzero.distributed.session import Session
from rankzero.distributed.timers import TIMERS
from rankzero.runs.reports.secrets import command_without_secrets


def describe_environment(session: Session) -> dict[str, Any]:
    """Returns the environment of an attempt as JSON can represent it, without secrets of the command line.

    Args:
        session: The processes.
    """
    world, launch = session.world, session.coordinator.launch
    is_cuda = world.accelerator == "cuda"
    return {
        "command": command_without_secrets(own_command()),
        "is_script": session.is_script,
        "folder": str(Path.cwd()),
        "commit": git_commit(Path.cwd()),
        "launcher": launch.launcher,
        "launcher_evidence": launch.evidence,
        "hosts": dict(Counter(session.coordinator.hosts)),
        "device": torch.cuda.get_device_name(world.index) if is_cuda else f"{world.accelerator} ({platform.machine()})",
        "backend": world.backend if world.size > 1 else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": lightning.__version__,
        "rankzero": __version__,
        "platform": platform.platform(),
    }


def git_commit(folder: Path) -> str | None:
    """Returns the git commit of the user's folder, with a note if tracked files have changed since; None without git.

    Args:
        folder: Folder in a git repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMERS.optional, check=True
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with changes that are not committed" if changed else commit
