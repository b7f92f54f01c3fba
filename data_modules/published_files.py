"""Files that somebody published: found on this machine, or downloaded once, and known to be what was published."""

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
"""How long a server may be silent."""


@dataclass(frozen=True)
class PublishedFile:
    """One file of a data set.

    Args:
        name: Its name.
        md5: Of the file as it was published.
        content_sha256: Of what is in it, for a .gz that somebody has packed anew (as Debian does).
    """

    name: str
    md5: str
    content_sha256: str | None = None

    def is_in(self, folder: Path) -> bool:
        """Whether the folder holds a file of this name."""
        return (folder / self.name).is_file()

    def is_sound(self, folder: Path) -> bool:
        """Whether the file in this folder is what was published."""
        data = (folder / self.name).read_bytes()
        if hashlib.md5(data, usedforsecurity=False).hexdigest() == self.md5:
            return True
        if self.content_sha256 is None:
            return False
        try:
            return hashlib.sha256(gzip.decompress(data)).hexdigest() == self.content_sha256
        except (OSError, EOFError, zlib.error):
            return False


def folder_with(files: Sequence[PublishedFile], folders: Sequence[Path]) -> Path | None:
    """The first of `folders` that holds all of `files`, or None."""
    return next((folder for folder in folders if all(file.is_in(folder) for file in files)), None)


def check(files: Sequence[PublishedFile], folder: Path, otherwise: str) -> None:
    """Raises a ValueError that names the files which are not what was published.

    Args:
        files: What should be there.
        folder: Where.
        otherwise: What to type to have them used all the same.
    """
    damaged = [file.name for file in files if not file.is_sound(folder)]
    if damaged:
        raise ValueError(
            f"corrupt: {', '.join(damaged)} in {folder.resolve()} (not what was published, by checksum); "
            f"delete {'it' if len(damaged) == 1 else 'them'} and start again to download anew{otherwise}"
        )


def download(files: Sequence[PublishedFile], folder: Path, fetch: Callable[[Path], None], by_hand: str) -> None:
    """Downloads `files` into `folder`, on one process of the machine at a time; the others find them there.

    They are fetched beside the folder's files, checked and then moved into place, so that a download that is
    interrupted leaves nothing that looks finished.

    Args:
        files: What is missing.
        folder: Where it belongs; made if need be.
        fetch: Puts the files into the folder it is given.
        by_hand: How to get them without a network.

    Raises:
        FileNotFoundError: There is no network, or what came is not what was published.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            if folder_with(files, [folder]):
                return
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as fresh:
                before = socket.getdefaulttimeout()
                socket.setdefaulttimeout(TIMEOUT_SECONDS)
                try:
                    fetch(Path(fresh))
                finally:
                    socket.setdefaulttimeout(before)
                check(files, Path(fresh), otherwise="")
                for file in files:
                    (Path(fresh) / file.name).replace(folder / file.name)
    except (OSError, RuntimeError, ValueError) as error:
        _remove_if_empty(folder, made)
        missing = [file.name for file in files if not file.is_in(folder)]
        raise FileNotFoundError(
            f"missing: {', '.join(missing)}; downloading failed ({error}). "
            f"Put the files into {folder.resolve()}{by_hand}"
        ) from None


def _remove_if_empty(folder: Path, made: Sequence[Path]) -> None:
    """Takes back the folders that were made for a download that failed, unless somebody else uses them by now."""
    with contextlib.suppress(OSError):
        if {entry.name for entry in folder.glob("*")} <= {".download.lock"} and made:
            (folder / ".download.lock").unlink(missing_ok=True)
        for parent in made:
            parent.rmdir()
