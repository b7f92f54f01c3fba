"""Keys in files of the user's configuration folder that no other user can read or replace. Does not import torch."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankzero.distributed.process.config_folder import config_folder

KEY_BYTES = 32

_ONLY_OWNER_WRITES, _ONLY_OWNER_READS = 0o022, 0o077


class NoKeyError(Exception):
    """Error for a key that is missing or cannot be used; the message states why."""


def load_key(name: str, create: bool) -> tuple[bytes, Path]:
    """Returns the key in a file of the user's configuration folder, and the path of the file.

    Raises:
        NoKeyError: The key cannot be used, or it does not exist and is not created.
    """
    folder = config_folder()
    if folder is None:
        raise NoKeyError("the user has no home directory (HOME is not set)")
    path = folder / name
    try:
        with _open_folder(folder, create) as folder_descriptor:
            if create and not path.exists():
                _create(folder_descriptor, name)
            return _read(folder_descriptor, path), path
    except OSError as error:
        links = "; it and its folder must not be symbolic links" * (error.errno in (errno.ELOOP, errno.ENOTDIR))
        raise NoKeyError(f"the key {path} cannot be used: {error.strerror}{links}") from error


@contextmanager
def _open_folder(folder: Path, create: bool) -> Iterator[int]:
    """Opens the key's folder, which must belong to the user and be writable by no other user; follows no link."""
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_owner(os.fstat(folder_descriptor), folder, _ONLY_OWNER_WRITES)
        yield folder_descriptor
    finally:
        os.close(folder_descriptor)


def _read(folder_descriptor: int, path: Path) -> bytes:
    descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_descriptor)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NoKeyError(f"{path} is not a regular file")
        _check_owner(status, path, _ONLY_OWNER_READS)
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise NoKeyError(f"{path} is damaged; delete it, and the next run creates another")
    return key


def _check_owner(status: os.stat_result, path: Path, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise NoKeyError(f"{path} belongs to another user (id {status.st_uid})")
    if status.st_mode & forbidden:
        raise NoKeyError(f"{path} is open to other users; to close it: chmod go-rwx {path}")


def _create(folder_descriptor: int, name: str) -> None:
    """Creates the key. If several processes do this at once, all of them use the key of the first."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_descriptor
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # independent of the umask
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor, follow_symlinks=False)
    finally:
        os.unlink(temporary, dir_fd=folder_descriptor)
