"""The key by which the processes of a run recognize one another. Does not import torch."""

import contextlib
import functools
import hmac
import os
import time
from dataclasses import dataclass, field

from rankzero.distributed.connections.key_file import NoKeyError, load_key
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

KEY_FILE = "key"
"""File in the user's configuration folder."""


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
        if self.secret is None:
            return ""
        return hmac.digest(self.secret, f"fingerprint {world_id}".encode(), "sha256").hex()


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
            secret, path = load_key(KEY_FILE, create=True)
            return Key(secret, str(path))
        except NoKeyError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or time.monotonic() > deadline:
                return Key(None, str(error))
        time.sleep(TIMERS.poll)
