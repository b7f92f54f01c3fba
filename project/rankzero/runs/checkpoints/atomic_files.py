"""Files that a crash, a full disk or a power cut leave written or not written, and never half. Imports no torch."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SAVING = ".saving"
"""Behind the name of what is being written, which begins with a dot."""


def write_text(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees the old one or the new one, whole."""
    with replacing(path, f".{os.getpid()}") as beside, synced(beside) as file:
        file.write(text.encode())


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to be written anew; at the end it is on the disk."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, mark: str = "") -> Iterator[Path]:
    """Gives the path of a file beside another one, which takes its place at the end, if all went well.

    Args:
        path: The other one.
        mark: What tells it from those of others who write the same file.
    """
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}{mark}{SAVING}")
    try:
        yield beside
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those that it is in, to last."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Waits until what a folder lists is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
