import socket
import sys

import pytest

from rankzero.distributed import network
from rankzero.distributed.connections import address_filter
from rankzero.distributed.connections.address_filter import accept_only_from

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters exist on Linux only")


def can_connect(listener):
    with socket.socket() as client:
        client.settimeout(0.3)
        return client.connect_ex(listener.getsockname()) == 0


def test_loopback_remains_accepted():
    with network.listen("127.0.0.1", 0) as listener:
        assert accept_only_from(listener, ["192.0.2.1"])
        assert can_connect(listener)


@pytest.mark.parametrize(("addresses", "is_accepted"), [(["127.0.0.1"], True), (["192.0.2.1", "127.0.0.2"], False)])
def test_other_addresses_are_discarded(monkeypatch, addresses, is_accepted):
    original = address_filter._instruction
    never = 0xFF  # so that loopback addresses need an entry of their own

    def without_loopback(code, value, otherwise=0):
        return original(code, never if value == 0x7F000000 else value, otherwise)

    monkeypatch.setattr(address_filter, "_instruction", without_loopback)
    with network.listen("127.0.0.1", 0) as listener:
        assert accept_only_from(listener, addresses)
        assert can_connect(listener) is is_accepted


def test_connections_from_accepted_addresses_carry_data():
    with network.listen("127.0.0.1", 0) as listener:
        assert accept_only_from(listener, ["127.0.0.1"])
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            accepted, _ = listener.accept()
            with accepted:
                client.sendall(b"x" * 100_000)
                received = 0
                while received < 100_000:
                    received += len(accepted.recv(1 << 16))


def test_many_addresses_are_combined_to_networks():
    addresses = [f"10.{first}.{second}.{third}" for first in range(4) for second in range(5) for third in range(200)]
    program = address_filter._program([int.from_bytes(socket.inet_aton(address)) for address in addresses])
    assert len(program) == 7 + 2 * 20
    with network.listen("127.0.0.1", 0) as listener:
        assert accept_only_from(listener, addresses) and can_connect(listener)


def test_too_many_networks_are_not_filtered():
    with network.listen("127.0.0.1", 0) as listener:
        addresses = [f"10.{first}.{second}.1" for first in range(12) for second in range(200)]
        assert not accept_only_from(listener, addresses) and can_connect(listener)


def test_a_listener_for_ipv6_and_an_invalid_address_are_not_filtered():
    with network.listen("127.0.0.1", 0) as listener:
        assert not accept_only_from(listener, ["::1"]) and can_connect(listener)
    with network.listen("::1", 0) as listener:
        assert not accept_only_from(listener, ["127.0.0.1"])
