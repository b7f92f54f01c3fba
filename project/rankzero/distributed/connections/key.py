"""The key of the processes of a run, and its file, which no other user can read or replace."""

import contextlib
import errno
import functools
import hmac
import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from rankzero.distributed.timers import TIMERS
from rankzero.messages import RequestError

KEY_VARIABLE = "RANKZERO_KEY"
"""Variable in which the user gives the same key to machines that do not share a home directory."""

KEY_FD = "RANKZERO_KEY_FD"
"""Variable set for local processes: the file descriptor of the pipe from which a process reads its key."""

MIN_KEY_LENGTH = 32
"""Characters; an eavesdropper can find a short key by trial."""

NEW_KEY_COMMAND = "export RANKZERO_KEY=$(openssl rand -hex 32)"
"""Command that creates a key. Its output must then be given to all machines."""


@dataclass(frozen=True)
class Key:
    """The key of this process.

    Args:
        secret: The key; None if there is none.
        origin: Where the key comes from, or why there is none.
        is_explicit: Whether the user or the parent process gave this key to all processes of the run, so that a process
            without it does not belong to the run.
    """

    secret: bytes | None = field(repr=False)
    origin: str
    is_explicit: bool = False

    def fingerprint(self, world_id: str) -> str:
        """Returns a text by which processes can compare their keys without revealing them; empty without a key."""
        text = f"fingerprint {world_id}".encode()
        return hmac.digest(self.secret, text, "sha256").hex() if self.secret is not None else ""


def config_folder() -> Path | None:
    """Returns the user's folder for Rankzero (XDG base directories); None if the user has no home directory."""
    for base, *subfolders in (("XDG_CONFIG_HOME",), ("HOME", ".config")):
        folder = Path(os.environ.get(base) or "")
        if folder.is_absolute():
            return folder.joinpath(*subfolders, "rankzero")
    return None


@functools.cache
def find_key() -> Key:
    """Returns the key of this process, and creates the user's key file if it is needed and does not exist.

    The sources, in this order: the parent process, `RANKZERO_KEY`, and the file `key` in the user's configuration
    folder, which only the user may read.

    Raises:
        RequestError: `RANKZERO_KEY` is too short.
    """
    descriptor, text = os.environ.pop(KEY_FD, None), os.environ.get(KEY_VARIABLE)
    if descriptor is not None:
        with contextlib.suppress(OSError, ValueError), os.fdopen(int(descriptor), "rb") as pipe:
            if secret := pipe.read():
                return Key(secret, "the process that started this one", is_explicit=True)
    if text:
        if len(text) < MIN_KEY_LENGTH:
            raise RequestError(
                f"{KEY_VARIABLE} as the key of this run",
                f"{KEY_VARIABLE} has {len(text)} characters, and at least {MIN_KEY_LENGTH} are required",
                f"{NEW_KEY_COMMAND}\nand give the same value to all machines",
            )
        return Key(text.encode(errors="surrogateescape"), KEY_VARIABLE, is_explicit=True)
    return _load()


def has_key_variable() -> bool:
    """Returns whether the user has set `RANKZERO_KEY`."""
    return bool(os.environ.get(KEY_VARIABLE))


def pass_key(secret: bytes) -> tuple[int, dict[str, str]]:
    """Returns a descriptor from which one child process reads a key, and the environment variable that names it.

    The caller closes the descriptor after it has started the process.
    """
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(secret)  # fits into the pipe's buffer
    return read_end, {KEY_FD: str(read_end)}


def _load() -> Key:
    """Returns the key in the user's file, which is created if it does not exist."""
    deadline = time.monotonic() + TIMERS.shared_file
    while True:
        try:
            secret, path = load_key("key", create=True)
            return Key(secret, str(path))
        except NoKeyError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or time.monotonic() > deadline:
                return Key(None, str(error))
        time.sleep(TIMERS.poll)


KEY_BYTES = 32


class NoKeyError(Exception):
    """Error for a key that is missing or cannot be used; the message states why."""


def load_key(name: str, create: bool) -> tuple[bytes, Path]:
    """Returns the key in a file of the user's configuration folder, and the path of the file; follows no link.

    Both must belong to the user. No other user may write to the folder, or read the file.

    Raises:
        NoKeyError: The key cannot be used, or it does not exist and is not created.
    """
    if (folder := config_folder()) is None:
        raise NoKeyError("the user has no home directory (HOME is not set)")
    path = folder / name
    try:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_owner(os.fstat(folder_descriptor), folder, forbidden=0o022)
            if create and not path.exists():
                _create(folder_descriptor, name)
            return _read(folder_descriptor, path), path
        finally:
            os.close(folder_descriptor)
    except OSError as error:
        links = "; it and its folder must not be symbolic links" * (error.errno in (errno.ELOOP, errno.ENOTDIR))
        raise NoKeyError(f"the key {path} cannot be used: {error.strerror}{links}") from error


def _read(folder_descriptor: int, path: Path) -> bytes:
    descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_descriptor)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NoKeyError(f"{path} is not a regular file")
        _check_owner(status, path, forbidden=0o077)
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder_descriptor)
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
