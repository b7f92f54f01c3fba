"""Checks that all ranks see the folder in which rank zero writes. Does not import torch."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError
from rankzero.runs.directory import RunDirectory

SHARED_FOLDER_ADVICE = "--root DIR, where DIR is on a file system that all hosts share"


def check_shared(run: RunDirectory) -> None:
    """Checks that this process sees the directory in which rank zero has begun an attempt.

    Raises:
        RequestError: This process sees another directory, or none.
    """

    def contains_attempt() -> bool:
        record = run.read("run.json")
        return not run.is_kept or (record.get("id") == run.id and len(record.get("attempts", ())) >= run.attempt)

    if not wait_until_visible(contains_attempt, run.path):
        root = run.path.parent
        folder = f"{root.absolute()}, in which rank zero has created the run {run.name}"
        raise RequestError(f"--root {root}", f"the host of this rank does not share {folder}", SHARED_FOLDER_ADVICE)


def wait_until_visible(is_visible: Callable[[], bool], folder: Path) -> bool:
    """Waits until this process sees what rank zero has written to a folder; returns False after a while."""
    deadline = time.monotonic() + TIMERS.shared_file
    while not is_visible():
        if time.monotonic() > deadline:
            return False
        time.sleep(TIMERS.poll)
        with contextlib.suppress(OSError):
            list(folder.iterdir())  # lets NFS refresh its cache
    return True
