"""PyTorch's store, through which the processes of a run exchange values before they have a process group."""

import socket
import time
from datetime import timedelta

import torch

from rankzero.distributed.timers import TIMERS
from rankzero.distributed.torch_inside import TCPStore
from rankzero.messages import AnotherRankFailed


def serve_store(ip: str, listener: socket.socket, timeout: float) -> TCPStore:
    """Returns the store, served on the socket of the rendezvous."""
    port, fd, limit = listener.getsockname()[1], listener.detach(), timedelta(seconds=timeout)
    return TCPStore(ip, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)


def connect_to_store(ip: str, port: int, timeout: float, server: str) -> TCPStore:
    """Returns a client of the store.

    The process that serves it has been listening since the rendezvous, but may import torch for a long time before it
    answers. If it no longer listens, it has ended.

    Raises:
        AnotherRankFailed: The process has ended, or does not answer in time.
    """
    deadline, seconds = time.monotonic() + timeout, TIMERS.store_attempt
    while True:
        try:
            limit = timedelta(seconds=seconds)
            store = TCPStore(ip, port, is_master=False, timeout=limit, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=timeout))
            return store
        except torch.distributed.DistError:
            if _has_ended(ip, port):
                raise AnotherRankFailed(f"{server} has ended: nothing listens at {ip}:{port} any more") from None
            if time.monotonic() > deadline:
                raise AnotherRankFailed(f"{server} did not answer at {ip}:{port} within {timeout:g} s") from None
            # Each attempt leaves connections that wait until they are accepted, and their number is limited.
            seconds = min(2 * seconds, 6 * TIMERS.store_attempt)


def _has_ended(ip: str, port: int) -> bool:
    """Returns whether the port is closed; it is not if the queue of connections that wait to be accepted is full."""
    try:
        socket.create_connection((ip, port), timeout=TIMERS.attempt).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
