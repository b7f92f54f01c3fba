"""Atomic file writes: a crash, a full disk or a power cut leaves no partial file. Does not import torch."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SAVING, DELETING = ".saving", ".deleting"
"""Suffixes of a file or folder that is being written or deleted; its name also begins with a dot."""


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: a reader finds the complete old text or the complete new one, even after a crash."""
    with replacing(path, f".{os.getpid()}") as temporary, synced(temporary) as file:
        file.write(text.encode())


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Opens an empty file for writing; after the `with` block, the content is on the disk."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, unique_suffix: str = "") -> Iterator[Path]:
    """Yields a temporary path next to `path`; renames it after the `with` block, or removes it on an error.

    `unique_suffix` differs between processes that write the same file.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}{unique_suffix}{SAVING}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents durably: all new entries are on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
