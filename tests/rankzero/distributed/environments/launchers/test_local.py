import pytest
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables, derived_port
from rankzero.distributed.environments.launchers import local
from recorded import LOCAL


def manual_launch(environ=None, **requested):
    return local.manual_launch(Variables(environ or {}), RequestedWorld(**requested))


def test_local_processes_are_detected_only_by_their_mark_and_need_all_other_variables():
    assert local.found(Variables({local.SUPERVISOR_PID: "1"})) and local.found(Variables(LOCAL))
    assert not local.found(Variables({**LOCAL, local.SUPERVISOR_PID: ""})) and not local.found(Variables({}))
    for name in LOCAL.keys() - {local.SUPERVISOR_PID}:
        with pytest.raises(KeyError, match=name):
            local.read(Variables({**LOCAL, name: ""}), RequestedWorld())


def test_values_equal_those_of_lightnings_environment_and_flags_do_not_change_them(monkeypatch):
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)
    launch, stock = detect(environ=LOCAL), TorchElasticEnvironment()
    assert (launch.rank, launch.local_rank) == (stock.global_rank(), stock.local_rank())
    assert (launch.world_size, launch.node_rank) == (stock.world_size(), stock.node_rank())
    assert (launch.address, launch.port) == (stock.main_address, stock.main_port)
    assert (launch.local_world_size, launch.num_nodes, launch.is_single_machine) == (2, 1, True)
    assert launch.launcher == "local" and launch.externally_created and launch.world_id == "local 1234"
    assert (launch.listening_fd, launch.evidence) == (None, "--devices 2; no launcher's variables are set")
    variables = {local.LISTENING_FD: "5", local.EVIDENCE: "RANK is set"}
    launch = local.read(Variables({**LOCAL, **variables}), RequestedWorld())
    assert (launch.listening_fd, launch.evidence) == (5, "--devices 2; RANK is set")
    launch = local.read(Variables(LOCAL), RequestedWorld(address="elsewhere", port=1, devices=7, node_rank=3))
    assert (launch.address, launch.port, launch.node_rank, launch.world_size) == ("127.0.0.1", 1234, 0, 2)


@pytest.mark.parametrize("node", range(3))
def test_the_first_rank_of_a_machine_joined_by_hand_follows_from_its_node_rank(node):
    launch = manual_launch(nodes=3, devices=2, node_rank=node, address="a", port=1)
    assert (launch.rank, launch.local_rank, launch.node_rank) == (2 * node, 0, node)
    assert (launch.world_size, launch.local_world_size, launch.num_nodes) == (6, 2, 3)
    assert launch.evidence == f"--nodes 3 --node_rank {node}; no launcher's variables are set"
    assert launch.world_id == "local 1" and not launch.is_single_machine


@pytest.mark.parametrize(("devices", "is_external"), [(None, False), (1, True), (2, False)])
def test_a_machine_joined_by_hand_starts_processes_unless_one_device_is_requested(devices, is_external):
    assert manual_launch(nodes=2, devices=devices, node_rank=0, address="a", port=1).externally_created == is_external
    assert not manual_launch(nodes=1, devices=devices, node_rank=0).externally_created
    launch = manual_launch(nodes=1, node_rank=0)  # a single machine needs no address
    assert (launch.address, launch.port, launch.world_size) == ("127.0.0.1", derived_port("by hand"), 1)


def test_address_and_port_of_machines_joined_by_hand_may_be_variables():
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    launch = manual_launch(environ, nodes=2, node_rank=1)
    assert (launch.address, launch.port, launch.variables) == ("a", 29500, environ)
    assert manual_launch(environ, nodes=2, node_rank=1, address="flag", port=7).address == "flag"
