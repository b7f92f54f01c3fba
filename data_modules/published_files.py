"""Published data files: found on this machine or downloaded once, and verified by checksum."""

import contextlib
import gzip
import hashlib
import socket
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

TIMEOUT_SECONDS = 30.0
"""Seconds without data from the server after which a download fails."""


@dataclass(frozen=True)
class PublishedFile:
    """File of a published data set.

    Args:
        name: Name of the file.
        md5: MD5 checksum of the published file.
        content_sha256: SHA-256 checksum of the decompressed content, for a .gz file that was compressed again (as
            Debian does).
    """

    name: str
    md5: str
    content_sha256: str | None = None

    def exists_in(self, folder: Path) -> bool:
        """Returns whether the folder contains a file of this name."""
        return (folder / self.name).is_file()

    def matches_checksum(self, folder: Path) -> bool:
        """Returns whether the file in this folder matches a published checksum."""
        data = (folder / self.name).read_bytes()
        if hashlib.md5(data, usedforsecurity=False).hexdigest() == self.md5:
            return True
        if self.content_sha256 is None:
            return False
        try:
            return hashlib.sha256(gzip.decompress(data)).hexdigest() == self.content_sha256
        except (OSError, EOFError, zlib.error):
            return False


def find_folder(files: Sequence[PublishedFile], folders: Sequence[Path]) -> Path | None:
    """Returns the first of `folders` that contains all of `files`, or None."""
    return next((folder for folder in folders if all(file.exists_in(folder) for file in files)), None)


def verify_checksums(files: Sequence[PublishedFile], folder: Path, advice: str) -> None:
    """Checks files against their published checksums.

    Args:
        files: The files to check.
        folder: Folder with the files.
        advice: End of the error message: what to type to use the files anyway.

    Raises:
        ValueError: At least one file does not match; the message names all of them.
    """
    damaged = [file.name for file in files if not file.matches_checksum(folder)]
    if damaged:
        raise ValueError(
            f"corrupt: {', '.join(damaged)} in {folder.resolve()} (the checksum differs from the published one); "
            f"delete {'it' if len(damaged) == 1 else 'them'} and type the same command to download again{advice}"
        )


def download(files: Sequence[PublishedFile], folder: Path, fetch: Callable[[Path], None], advice: str) -> None:
    """Downloads `files` into `folder`, in one process per machine; the other processes wait and use its files.

    The files are downloaded into a temporary folder, checked and then moved, so that an interrupted download leaves no
    file that looks complete.

    Args:
        files: The missing files.
        folder: Destination folder; created if necessary.
        fetch: Downloads the files into the folder that it receives.
        advice: End of the error message: how to get the files without a network.

    Raises:
        FileNotFoundError: There is no network, or a downloaded file does not match its checksum.
    """
    created_folders = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            if find_folder(files, [folder]):
                return
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary_folder:
                previous_timeout = socket.getdefaulttimeout()
                socket.setdefaulttimeout(TIMEOUT_SECONDS)
                try:
                    fetch(Path(temporary_folder))
                finally:
                    socket.setdefaulttimeout(previous_timeout)
                verify_checksums(files, Path(temporary_folder), advice="")
                for file in files:
                    (Path(temporary_folder) / file.name).replace(folder / file.name)
    except (OSError, RuntimeError, ValueError) as error:
        _remove_if_empty(folder, created_folders)
        missing = [file.name for file in files if not file.exists_in(folder)]
        raise FileNotFoundError(
            f"missing: {', '.join(missing)}; downloading failed ({error}). "
            f"Put the files into {folder.resolve()}{advice}"
        ) from None


def _remove_if_empty(folder: Path, created_folders: Sequence[Path]) -> None:
    """Removes the folders created for a failed download, unless another process has put files into them since."""
    with contextlib.suppress(OSError):
        if {entry.name for entry in folder.glob("*")} <= {".download.lock"} and created_folders:
            (folder / ".download.lock").unlink(missing_ok=True)
        for parent in created_folders:
            parent.rmdir()
