"""Addresses, interfaces and ports of this machine. Imports no torch."""

import contextlib
import os
import socket
import sys

import psutil

from rankzero.messages import RequestError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def resolve(address: str) -> list[str]:
    """The IP addresses of a host, or of several with commas between them.

    Raises:
        RequestError: It has none.
    """
    found: list[str] = []
    for host in address.split(","):
        try:
            found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise RequestError(
                f"to meet at {host} (MASTER_ADDR, --master_addr or the launcher's first host)",
                f"{host!r} does not resolve on {socket.gethostname()}: {getattr(error, 'strerror', None) or error}",
                "--master_addr HOST, where HOST is the name or IP address of rank 0's machine",
            ) from None
    return list(dict.fromkeys(found))


def is_mine(ip: str) -> bool:
    """Whether this machine has an IP address."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
        return True


def is_loopback(ip: str) -> bool:
    """Whether an IP address reaches no further than this machine."""
    return ip.startswith("127.") or ip == "::1"


def listen(ip: str, port: int) -> socket.socket:
    """Listens on a port of one address of this machine, or of all (`""`).

    Raises:
        OSError: The port is in use.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ip, port))
        listening.listen(4096)
    except OSError:
        listening.close()
        raise
    return listening


def holder(port: int) -> str:
    """Who listens on a port of this machine, where that can be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split())
                return f"process {connection.pid} ({command[:100]})"
    return "a process of another user"


def source_address(target: str) -> str | None:
    """The address of this machine from which it reaches another one; None where there is no way."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: UDP
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(ip: str) -> str | None:
    """The name of the interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == ip for address in addresses):
            return name
    return None


def address_of(interface: str) -> str:
    """The address of an interface.

    Raises:
        RequestError: There is no such interface, or it has no address.
    """
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, []):
            if address.family == family:
                return str(address.address.partition("%")[0])
    names = ", ".join(sorted(interfaces))
    raise RequestError(
        f"--interface {interface}",
        f"{socket.gethostname()} has no interface of that name with an address; it has {names}",
        f"--interface {next((name for name in sorted(interfaces) if name != 'lo'), 'lo')}",
    )


def use_interface(asked: str | None, found: str | None) -> str | None:
    """Tells gloo and NCCL which interface to use, before they start; returns gloo's.

    Args:
        asked: `--interface`, which counts for both. It wins over the variables, as flags do.
        found: The interface that leads to the other machines, for gloo, which would otherwise take the one that this
            machine's own name resolves to (on Debian 127.0.1.1). NCCL looks for itself, except within one machine.
    """
    if sys.platform != "linux":
        return None
    if asked:
        os.environ[GLOO] = os.environ[NCCL] = asked
    elif found:
        os.environ.setdefault(GLOO, found)
        if found == "lo":
            os.environ.setdefault(NCCL, found)
    return os.environ.get(GLOO)


def silence_socket_warnings() -> None:
    """Keeps torch's C++ warnings about sockets to itself, such as on clusters without reverse name lookup.

    It has to be said before torch is imported; what went wrong comes as an exception anyway.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def interface_by_variable() -> str | None:
    """The interface that the usual variables name, where they name one."""
    for name in (GLOO, NCCL):
        value = os.environ.get(name, "").lstrip("=")
        if value in psutil.net_if_addrs():
            return value
    return None
