"""Addresses, network interfaces and ports of this machine."""

import contextlib
import os
import socket
import sys

import psutil

from rankzero.messages import RequestError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def resolve(address: str) -> list[str]:
    """Returns the IP addresses of a host, or of several hosts separated by commas.

    Raises:
        RequestError: A host name does not resolve.
    """
    addresses: list[str] = []
    for host in address.split(","):
        try:
            addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise RequestError(
                f"rendezvous at {host} (MASTER_ADDR, --master_addr or the launcher's first host)",
                f"{host!r} does not resolve on {socket.gethostname()}: {getattr(error, 'strerror', None) or error}",
                "--master_addr HOST, where HOST is the name or IP address of rank 0's machine",
            ) from None
    return list(dict.fromkeys(addresses))


def is_local_address(ip: str) -> bool:
    """Returns whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((ip, 0))
        return True
    return False


def is_loopback(ip: str) -> bool:
    """Returns whether an IP address is a loopback address, which other machines cannot reach."""
    return ip.startswith("127.") or ip == "::1"


def listen(ip: str, port: int) -> socket.socket:
    """Returns a socket that listens on a port of one address of this machine, or of all its addresses (`""`).

    Raises:
        OSError: The port is in use, or the process may not listen on it.
    """
    return socket.create_server((ip, port), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=4096)


def reachable_address(listener: socket.socket) -> str:
    """Returns an address at which processes of this machine reach a listening socket; empty for a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return ""
    ip = str(listener.getsockname()[0])
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip)


def describe_listener(port: int) -> str:
    """Describes the process that listens on a port of this machine, as far as it is visible to this user."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split())
                return f"process {connection.pid} ({command[:100]})"
    return "a process of another user"


def source_address(target: str) -> str | None:
    """Returns the address from which this machine reaches the address `target`; None if there is no route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # UDP: sends no packet
        return str(probe.getsockname()[0])
    return None


def interface_of(ip: str) -> str | None:
    """Returns the name of the interface that has this IP address; None if there is no such interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == ip for entry in addresses):
            return name
    return None


def address_of(interface: str) -> str:
    """Returns the IP address of an interface, IPv4 if it has one.

    Raises:
        RequestError: The interface does not exist or has no address.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address for family in families for entry in entries if entry.family == family]
        for name, entries in sorted(psutil.net_if_addrs().items())
    }
    if addresses.get(interface):
        return str(addresses[interface][0].partition("%")[0])
    names = [name for name, found in addresses.items() if found]
    found = f"{socket.gethostname()} has no network interface of that name with an address; those with one are"
    other = next((name for name in names if name != "lo"), "lo")
    raise RequestError(f"--interface {interface}", f"{found} {', '.join(names)}", f"--interface {other}")


def use_interface(requested: str | None, detected: str | None) -> None:
    """Sets the interface that gloo and NCCL use, before they start.

    Args:
        requested: `--interface`, which applies to both. Like all flags, it overrides environment variables.
        detected: The interface that reaches the other machines. It is set for gloo, which by default uses the interface
            with the address of this machine's host name (127.0.1.1 on Debian). NCCL finds an interface itself, so
            `detected` is set for NCCL only if it is `lo`, on one machine.
    """
    if sys.platform != "linux":
        return
    if requested:
        os.environ[GLOO] = os.environ[NCCL] = requested
    elif detected:
        os.environ.setdefault(GLOO, detected)
        if detected == "lo":
            os.environ.setdefault(NCCL, detected)


def interface_by_variable() -> str | None:
    """Returns the interface specified by gloo's or NCCL's variable, if this machine has it; otherwise None."""
    names = (os.environ.get(variable, "").lstrip("=") for variable in (GLOO, NCCL))
    return next((name for name in names if name in psutil.net_if_addrs()), None)
