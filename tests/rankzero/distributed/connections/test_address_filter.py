import socket
import sys

import pytest

from rankzero.distributed.connections import address_filter
from rankzero.distributed.connections.address_filter import accept_only_from
from rankzero.distributed.coordination import network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters exist on Linux only")


def can_connect(listener):
    with socket.socket() as client:
        client.settimeout(0.3)
        return client.connect_ex(listener.getsockname()) == 0


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


@pytest.mark.parametrize("addresses", [["192.0.2.1"], ["127.0.0.1"]])
def test_connections_over_loopback_remain_accepted_and_carry_data(addresses):
    with network.listen("127.0.0.1", 0) as listener:
        assert accept_only_from(listener, addresses)
        with socket.create_connection(listener.getsockname(), timeout=5) as client:
            accepted, _ = listener.accept()
            with accepted:
                client.sendall(b"x" * 100_000)
                received = 0
                while received < 100_000:
                    received += len(accepted.recv(1 << 16))


def test_a_listener_for_ipv6_and_an_invalid_address_are_not_filtered():
    with network.listen("127.0.0.1", 0) as listener, network.listen("::1", 0) as listener_for_ipv6:
        assert not accept_only_from(listener, ["::1"]) and can_connect(listener)
        assert not accept_only_from(listener_for_ipv6, ["127.0.0.1"])


def test_more_addresses_than_the_kernel_accepts_are_not_filtered():
    with network.listen("127.0.0.1", 0) as listener:
        assert not accept_only_from(listener, [f"10.1.{i}.{j}" for i in range(20) for j in range(200)])
        assert can_connect(listener)
