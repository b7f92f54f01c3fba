import os
import socket

import pytest

from rankzero.distributed.coordination import network
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.rendezvous import errors
from rankzero.distributed.world import Peer

HOST = socket.gethostname()


def launch(size=4, **fields):
    return Launch(**{"launcher": "env", "world_size": size, "address": "a", "port": 29500, **fields})


def peers_of(*ranks, hosts="a", nodes=None):
    """Returns processes with these ranks, hosts and nodes; a single host applies to all of them."""
    hosts = hosts * len(ranks) if len(hosts) == 1 else hosts
    nodes = [None] * len(ranks) if nodes is None else nodes
    return [Peer(rank, None, node, 4, host, 1) for rank, host, node in zip(ranks, hosts, nodes, strict=True)]


def test_at_most_16_missing_ranks_are_listed():
    for size, ranks, text in (
        *[(2, [0], "missing rank 1"), (3, [0], "missing ranks 1, 2"), (4, [0, 2], "missing ranks 1, 3")],
        (17, [0], "missing ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
        (18, [0], "missing ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 1 more"),
        (1000, [0, 5], "missing ranks 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 and 982 more"),
    ):
        assert errors.describe_missing_ranks(launch(size), peers_of(*ranks)) == text


def test_missing_tasks_without_ranks_are_counted_and_a_rank_without_contact_misses_rank_zero():
    assert errors.describe_missing_ranks(launch(rank=None), peers_of(None, None)) == "missing 2 of 4 tasks"
    text = errors.describe_missing_ranks(launch(rank=2), peers_of(2))
    assert text.startswith("missing rank 0, ") and text.endswith(" on a:29500")


def test_missing_machines_are_named():
    for fields, members, missing_machines in (
        *[({"num_nodes": None}, peers_of(0), None), ({"num_nodes": 1}, peers_of(0, nodes=[0]), None)],
        ({"num_nodes": 1, "hosts": ("n1",)}, peers_of(0, hosts=["n1.site.org"]), None),
        ({"num_nodes": 2}, peers_of(0, nodes=[0]), "node 1"),
        ({"num_nodes": 3}, peers_of(0, 1, nodes=[0, 0]), "node 1, node 2"),
        *(({"num_nodes": 2}, peers_of(0, 1, nodes=nodes), None) for nodes in ([0, 1], [0, None])),
        ({"num_nodes": 2, "hosts": ("a", "b")}, peers_of(0), "b"),
        ({"num_nodes": 2, "hosts": ("a", "b")}, peers_of(0, 1, hosts="ab"), None),
        ({"num_nodes": 2, "hosts": ("n1", "n2")}, peers_of(0, hosts=["n1.site.org"], nodes=[0]), "n2"),
        ({"num_nodes": 2, "hosts": ("n1", "n2")}, peers_of(0, 1, hosts=["x", "y"], nodes=[0, 1]), None),
        ({"num_nodes": 2, "hosts": ("a", "a")}, peers_of(0, nodes=[0]), "node 1"),
    ):
        text = errors.missing_processes_error(launch(local_world_size=None, **fields), members, 5).found
        if missing_machines is None:
            assert "no process from" not in text
        else:
            assert f"; no process from {missing_machines}; " in text


def test_the_error_about_missing_ranks_states_the_shape_counts_hosts_and_port():
    error = errors.missing_processes_error(launch(num_nodes=None), peers_of(0, 1, hosts="ba"), 0.5)
    assert error.asked == "4 processes within 0.5 s (--start_timeout)"
    assert error.found == "missing ranks 2, 3; 2 of 4 processes connected, from a, b"
    assert " a:29500.\n" in error.instead and error.instead.endswith("--start_timeout 4")
    assert "--start_timeout 1200" in errors.missing_processes_error(launch(), peers_of(0), 300.0).instead


def test_rank_zero_proposes_its_own_host_for_an_address_of_another_machine():
    for launcher, prefix, lines in (
        ("local", "--node_rank 0 on a\nor ", 2),
        ("mpi", f"mpirun -x MASTER_ADDR={HOST} ... (Open MPI), -genv MASTER_ADDR {HOST} (hydra),\nor ", 2),
        ("slurm", "", 1),
        ("env", "", 1),
    ):
        error = errors.wrong_address_error(launch(rank=0, launcher=launcher), ["192.0.2.1", "192.0.2.2"])
        assert error.asked == "rendezvous at a:29500, the machine of rank 0"
        assert error.found == f"rank 0 is on {HOST}, but a (192.0.2.1, 192.0.2.2) is another machine or does not exist"
        assert error.instead == f"{prefix}--master_addr {HOST}" and len(error.instead.splitlines()) == lines


def test_a_rank_at_the_given_address_reports_that_rank_zero_is_elsewhere():
    error = errors.wrong_address_error(launch(rank=3), ["192.0.2.1"])
    assert error.found == f"a (192.0.2.1) is {HOST}, but rank 0 is elsewhere: this is rank 3"
    assert error.instead == "--master_addr HOST"


@pytest.mark.parametrize("greeting", ["", "HTTP/1.1 400 Bad Request", "RANKZERO", "\x1b[2J"])
def test_the_local_process_that_uses_rank_zeros_port_is_named(greeting):
    with network.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        own = errors.no_answer_error(launch(rank=0, port=port), ["127.0.0.1"])
        others = errors.wrong_listener_error(launch(rank=1, address="127.0.0.1", port=port), greeting)
    assert own.asked == f"port {port} of {HOST} for the rendezvous"
    assert own.found.startswith(f"it is in use by process {os.getpid()} (")
    assert own.instead.startswith("another --master_port PORT")
    assert others.found.startswith(f"that port is in use by process {os.getpid()} (")


def test_an_address_that_does_not_answer_and_another_run_on_the_port_are_named():
    error = errors.no_answer_error(launch(rank=1), ["192.0.2.1", "192.0.2.2"])
    assert error.asked.startswith("rendezvous at a:29500 (")
    assert error.found == f"a (192.0.2.1, 192.0.2.2) does not answer {HOST}"
    assert error.instead.startswith("--master_addr HOST")
    error = errors.wrong_listener_error(launch(rank=1), f'{errors.GREETING} "slurm 12.0"\n')
    assert error.asked == "rendezvous at a:29500"
    assert error.found == 'on that port is another run\'s rank 0 ("slurm 12.0")'
    assert error.instead.startswith("another --master_port PORT")
    text = errors.wrong_listener_error(launch(rank=1, address="192.0.2.1"), "SSH-2.0").found
    assert text.startswith("on that port is ") and "in use by" not in text
