"""Limits a listening socket to the addresses of some machines.

PyTorch's store accepts any connection. The kernel can discard the packets of all machines that do not belong to the run
before the store sees them: a socket filter (socket(7), SO_ATTACH_FILTER) is a small program that the kernel runs for
each packet. It needs no privileges.
"""

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Collection

SO_ATTACH_FILTER = 26  # Linux: asm-generic/socket.h

# Instructions of linux/bpf_common.h and linux/filter.h
_LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_SOURCE_ADDRESS = (-0x100000 + 12) & 0xFFFFFFFF  # SKF_NET_OFF, offset 12 of an IPv4 header
_ACCEPT, _DISCARD = 0xFFFFFFFF, 0


def accept_only_from(listener: socket.socket, addresses: Collection[str]) -> bool:
    """Discards new connections from all other machines, and returns whether that is supported.

    Loopback addresses remain accepted. The kernel refuses a filter for more than 2,000 addresses.
    """
    if sys.platform != "linux" or listener.family != socket.AF_INET:
        return False
    with contextlib.suppress(OSError, ValueError):
        program = _program({int(ipaddress.IPv4Address(address)) for address in addresses})
        code = ctypes.create_string_buffer(b"".join(program))
        option = struct.pack("HP", len(program), ctypes.addressof(code))  # struct sock_fprog
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
        return True
    return False


def _program(addresses: Collection[int]) -> list[bytes]:
    """Returns the instructions of the filter."""
    program = [
        _instruction(_LOAD_WORD, _SOURCE_ADDRESS),
        _instruction(_AND, 0xFF000000),
        _instruction(_JUMP_IF_EQUAL, int(ipaddress.IPv4Address("127.0.0.0")), otherwise=1),
        _instruction(_RETURN, _ACCEPT),
        _instruction(_LOAD_WORD, _SOURCE_ADDRESS),
    ]
    for address in addresses:
        program += [_instruction(_JUMP_IF_EQUAL, address, otherwise=1), _instruction(_RETURN, _ACCEPT)]
    return [*program, _instruction(_RETURN, _DISCARD)]


def _instruction(code: int, value: int, otherwise: int = 0) -> bytes:
    """Returns a `struct sock_filter`; `otherwise` is the number of instructions to skip if a comparison fails."""
    return struct.pack("HBBI", code, 0, otherwise, value)
