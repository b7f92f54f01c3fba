"""Rank zero's socket for the rendezvous."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from functools import partial

from rankzero.distributed.connections.key import Key
from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.errors import wrong_address_error
from rankzero.distributed.rendezvous.server import RendezvousServer
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.distributed.world import Peer
from rankzero.messages import RequestError


def resolve_address(launch: Launch, deadline: float) -> list[str]:
    """Returns the IP addresses of the rendezvous. Retries until `deadline`, in seconds of `time.monotonic`.

    The name of a Kubernetes pod resolves only once the pod runs. Hosts that a scheduler lists are running already.

    Raises:
        RequestError: The name does not resolve.
    """
    progress = Progress(deadline - time.monotonic())
    while True:
        try:
            return network.resolve(launch.address)
        except RequestError as error:
            if launch.hosts or time.monotonic() > deadline:
                raise
            if launch.local_rank in (0, None):
                progress.print_if_due(partial(getattr, error, "found"))
            SIGNALS.check_stop_request()
            time.sleep(TIMERS.slow_poll)


def listen_for_ranks(launch: Launch, interface: str | None, key: Key, deadline: float) -> socket.socket | None:
    """Returns rank zero's socket; None if the port is in use, for example by a process of this world.

    If the result is None, the caller connects to the port instead. `deadline` is that of `resolve_address`.

    Raises:
        RequestError: The address is not this machine's, or this process may not listen on the port.
    """
    if launch.listening_fd is not None:
        return socket.socket(fileno=launch.listening_fd)
    ips = resolve_address(launch, deadline)
    own_addresses = [ip for ip in ips if network.is_local_address(ip)]
    try:
        listener = network.listen(listening_address(launch, own_addresses, interface), launch.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RequestError(
            f"port {launch.port} of {socket.gethostname()} for the rendezvous",
            str(error.strerror),
            "--master_port PORT (or MASTER_PORT=PORT), 1024 or more, the same on every machine",
        ) from None
    if not own_addresses and not _reaches_itself(ips, launch.port, listener):
        refusal = wrong_address_error(launch, ips)
        if launch.hosts:  # the other ranks try this host next, see rankzero.distributed.rendezvous.client
            _refuse_all(launch, listener, TIMERS.first_answer, refusal, key)
        listener.close()
        raise refusal
    return listener


def listening_address(launch: Launch, own_addresses: Sequence[str], interface: str | None) -> str:
    """Returns the address to listen on; all addresses (`""`) if it is unknown which one the other ranks use."""
    if interface := interface or network.interface_by_variable():
        return network.address_of(interface)
    external_addresses = [ip for ip in own_addresses if not network.is_loopback(ip)]
    if launch.launcher == "pbs" and not launch.is_single_machine:
        return ""  # the address is rank zero's own host name here, and its name in the node file elsewhere
    may_be_loopback = launch.is_single_machine or launch.address in ("localhost", *own_addresses)
    if own_addresses and not external_addresses and may_be_loopback:
        return own_addresses[0]
    # A host name that resolves to loopback here (127.0.1.1 on Debian) resolves to another address on other machines.
    return external_addresses[0] if len(external_addresses) == 1 == len(own_addresses) else ""


def _reaches_itself(ips: Sequence[str], port: int, listener: socket.socket) -> bool:
    """Whether connections to a foreign address arrive at this socket, as in a container with a published port."""
    token = os.urandom(16)
    for ip in ips:
        with contextlib.suppress(OSError), socket.create_connection((ip, port), timeout=TIMERS.attempt) as outgoing:
            outgoing.sendall(token)
            if _receives(listener, token):
                return True
    return False


def _receives(listener: socket.socket, token: bytes) -> bool:
    """Returns whether a new connection sends the token within `TIMERS.attempt`; closes all others."""
    deadline, listener_timeout = time.monotonic() + TIMERS.attempt, listener.gettimeout()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        opened.callback(listener.settimeout, listener_timeout)
        selector.register(listener, selectors.EVENT_READ)
        while (seconds := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(seconds):
                with contextlib.suppress(OSError):
                    if key.fileobj is listener:
                        selector.register(opened.enter_context(listener.accept()[0]), selectors.EVENT_READ)
                        continue
                    selector.unregister(key.fileobj)
                    if key.fileobj.recv(len(token)) == token:  # type: ignore[union-attr]
                        return True
    return False


def reject_clients(launch: Launch, ips: Sequence[str], error: RequestError, key: Key) -> None:
    """Sends `error` to processes that connect to this machine instead of rank zero's, for `TIMERS.refuse`."""
    with contextlib.suppress(OSError), network.listen(ips[0], launch.port) as listener:
        _refuse_all(launch, listener, TIMERS.refuse, error, key)


def _refuse_all(launch: Launch, listener: socket.socket, seconds: float, refusal: RequestError, key: Key) -> None:
    """Sends `refusal` to all processes that connect within some seconds."""
    server = RendezvousServer(launch, Peer.this(launch, key), [listener], time.monotonic() + seconds, seconds, key)
    with contextlib.suppress(RequestError):
        server.wait(refusal)
