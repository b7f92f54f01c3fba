"""Unix sockets between the processes of one user on one machine."""

import contextlib
import os
import socket
import struct
import sys
from functools import cache
from hashlib import sha256

from rankzero.distributed.timers import TIMERS


@cache
def is_supported() -> bool:
    """Returns whether this system has, and allows, Unix sockets whose name disappears with them."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("")  # the kernel chooses an abstract address
        return True
    return False


def listen_locally(name: str) -> socket.socket | None:
    """Returns a socket that listens under a name; None if the name is taken, and if `is_supported` is False.

    The name exists until the socket is closed, and only within the network namespace of this process.
    """
    if not is_supported():
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen(4096)
    except OSError:
        listener.close()
        return None
    return listener


def connect_locally(name: str) -> socket.socket | None:
    """Returns a connection to the process of the same user that listens under a name; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        connection.settimeout(TIMERS.attempt)
        connection.connect(_address(name))
        if is_own_user(connection):
            return connection
    connection.close()
    return None


def is_own_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket belongs to the user of this process."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _address(name: str) -> str:
    """Returns an abstract address (unix(7)), which is at most 107 bytes long."""
    return f"\0rankzero {os.geteuid()} {sha256(name.encode()).hexdigest()}"
