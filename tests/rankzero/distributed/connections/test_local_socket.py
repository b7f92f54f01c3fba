import socket
import sys

import pytest

from rankzero.distributed.connections import local_socket
from rankzero.distributed.connections.local_socket import connect_locally, is_supported, listen_locally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets with abstract addresses exist on Linux only")


def test_one_listener_at_a_time_has_a_name_and_processes_of_the_same_user_connect():
    with listen_locally("a test") as listener, connect_locally("a test") as connection:
        assert listen_locally("a test") is None
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            assert connection.recv(1) == b"x"
    with listen_locally("a test"):
        assert connect_locally("another test") is None


def test_sockets_that_the_kernel_refuses_are_not_supported(monkeypatch):
    class RefusedSocket(socket.socket):
        """A socket of a kernel whose security policy refuses Unix sockets."""

        def bind(self, address):
            raise PermissionError

    monkeypatch.setattr(local_socket, "is_supported", is_supported.__wrapped__)
    monkeypatch.setattr(socket, "socket", RefusedSocket)
    assert not local_socket.is_supported()
    assert listen_locally("a test") is None and connect_locally("a test") is None
