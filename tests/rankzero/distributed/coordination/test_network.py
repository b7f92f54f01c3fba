import os
import socket

import psutil
import pytest

from rankzero.distributed.coordination import network
from running import refusal_of


def test_host_names_resolve_and_addresses_of_this_machine_are_recognized():
    assert network.is_local_address("127.0.0.1") and not network.is_local_address("192.0.2.1")
    assert network.resolve("127.0.0.1,localhost")[0] == "127.0.0.1"
    assert network.is_loopback("127.0.1.1") and not network.is_loopback("10.0.0.1")
    for name in ("no-such.invalid", "a b", "é" * 70, "..", "host\nname"):
        assert "does not resolve" in refusal_of(network.resolve, name).found


def test_the_process_that_listens_on_a_port_is_named_and_a_closed_port_can_be_reused_at_once():
    with network.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert f"process {os.getpid()}" in network.describe_listener(port)
        with pytest.raises(OSError, match="in use"):
            network.listen("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = listener.accept()
            connection.close()
    network.listen("127.0.0.1", port).close()


def test_interfaces_are_found_by_address_and_addresses_by_interface(monkeypatch):
    assert network.interface_of("127.0.0.1") == "lo" and network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.address_of("lo") == "127.0.0.1"
    error = refusal_of(network.address_of, "nosuch0")
    assert "no network interface of that name" in error.found and "lo" in error.found
    interfaces = psutil.net_if_addrs()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {**interfaces, "a0": interfaces["lo"][:0]})
    error = refusal_of(network.address_of, "a0")  # which has no address, so it is not suggested
    assert "interface a0" in error.asked and "a0" not in error.found + error.instead


def test_the_interface_is_set_for_gloo_and_nccl(monkeypatch):
    for name in (network.GLOO, network.NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    network.use_interface(None, "eth7")
    network.use_interface(None, "eth8")  # an existing setting is kept
    assert os.environ[network.GLOO] == "eth7" and network.NCCL not in os.environ
    network.use_interface("lo", "eth7")
    assert os.environ[network.GLOO] == os.environ[network.NCCL] == "lo"
    assert network.interface_by_variable() == "lo"
    monkeypatch.setenv(network.GLOO, "^docker")
    monkeypatch.setenv(network.NCCL, "=lo")
    assert network.interface_by_variable() == "lo"
