import socket
import sys

import pytest

from rankzero.distributed.connections.local_socket import connect_locally, is_supported, listen_locally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets with abstract addresses exist on Linux only")


def test_a_process_of_the_same_user_connects():
    with listen_locally("a test") as listener, connect_locally("a test") as connection:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            assert connection.recv(1) == b"x"


def test_a_name_is_taken_by_one_listener_at_a_time():
    with listen_locally("a test"):
        assert listen_locally("a test") is None
    with listen_locally("a test"):
        assert connect_locally("another test") is None


@pytest.fixture
def refusing_kernel(monkeypatch):
    """A kernel whose security policy refuses Unix sockets."""

    class RefusedSocket(socket.socket):
        def bind(self, address):
            raise PermissionError

    is_supported.cache_clear()
    monkeypatch.setattr(socket, "socket", RefusedSocket)
    yield
    is_supported.cache_clear()


def test_refused_sockets_are_not_supported(refusing_kernel):
    assert not is_supported() and listen_locally("a test") is None and connect_locally("a test") is None
