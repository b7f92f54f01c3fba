"""Signature that proves that a run of the same user wrote a checkpoint. Does not import torch.

The signature is an HMAC of the state file's name, size and sha256. Its key is a file that only the user can read
(`~/.config/rankzero/checkpoint.key`, or below XDG_CONFIG_HOME). Without a usable key, no checkpoint is signed and no
signature is accepted.
"""

import contextlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankzero.distributed.process.config_folder import config_folder

KEY_FILE = "checkpoint.key"
KEY_BYTES = 32

_PURPOSE = "rankzero checkpoint, version 1"
_ONLY_OWNER_WRITES, _ONLY_OWNER_READS = 0o022, 0o077


class NoKeyError(Exception):
    """Error for a key that is missing or cannot be used; the message states why."""


def sign(name: str, description: Mapping[str, Any]) -> str:
    """Signs a state file with the user's key, and creates the key if the user has none.

    Args:
        name: Name of the file.
        description: `bytes` and `sha256` of the file.

    Raises:
        NoKeyError: The key cannot be used, or it does not exist and cannot be created.
    """
    return _hmac(_load_key(create=True), name, description)


def is_signed(name: str, description: Mapping[str, Any], claimed_signature: object) -> bool:
    """Returns whether `claimed_signature` is the signature of this file with this user's key."""
    if not isinstance(claimed_signature, str) or not claimed_signature.isascii():
        return False
    try:
        return hmac.compare_digest(_hmac(_load_key(create=False), name, description), claimed_signature)
    except NoKeyError:
        return False


def key_problem() -> str | None:
    """Returns why the user's key cannot be used; None if it can be used or does not exist yet."""
    try:
        _load_key(create=False)
    except NoKeyError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else str(error)
    return None


def _hmac(key: bytes, name: str, description: Mapping[str, Any]) -> str:
    message = json.dumps([_PURPOSE, name, description["bytes"], description["sha256"]])
    return hmac.new(key, message.encode(), "sha256").hexdigest()


def _load_key(create: bool) -> bytes:
    folder = config_folder()
    if folder is None:
        raise NoKeyError("the user has no home directory (HOME is not set)")
    try:
        with _open_folder(folder, create) as folder_descriptor:
            try:
                return _read(folder_descriptor, folder)
            except FileNotFoundError:
                if not create:
                    raise
            _create(folder_descriptor)
            return _read(folder_descriptor, folder)
    except OSError as error:
        raise NoKeyError(f"the key {folder / KEY_FILE} cannot be used: {error.strerror}") from error


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


def _read(folder_descriptor: int, folder: Path) -> bytes:
    descriptor = os.open(KEY_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_descriptor)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NoKeyError(f"{folder / KEY_FILE} is not a regular file")
        _check_owner(status, folder / KEY_FILE, _ONLY_OWNER_READS)
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise NoKeyError(f"{folder / KEY_FILE} is damaged; delete it, and the next run creates another")
    return key


def _check_owner(status: os.stat_result, path: Path, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise NoKeyError(f"{path} belongs to another user (id {status.st_uid})")
    if mode := stat.S_IMODE(status.st_mode) & forbidden:
        raise NoKeyError(f"{path} is open to other users; to close it: chmod go-{_permission_letters(mode)} {path}")


def _permission_letters(mode: int) -> str:
    return "".join(letter for letter, bits in (("r", 0o044), ("w", 0o022), ("x", 0o011)) if mode & bits)


def _create(folder_descriptor: int) -> None:
    """Creates the key. If several processes do this at once, all of them use the key of the first."""
    temporary = f".{KEY_FILE}.{secrets.token_hex(8)}"
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
            os.link(
                temporary, KEY_FILE, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor, follow_symlinks=False
            )
    finally:
        os.unlink(temporary, dir_fd=folder_descriptor)
