import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import env
from recorded import ENV

NODES = {**ENV, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
GROUPS = {**NODES, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def read(variables, **requested):
    return detect(RequestedWorld(launcher="env", **requested), variables)


def test_an_address_alone_is_no_launcher():
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    for variables in ({}, address, {"RANK": "", "WORLD_SIZE": ""}):
        assert not env.found(Variables(variables))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        assert env.found(Variables({name: "1"})) and env.found(Variables({name: "0"}))


@pytest.mark.parametrize("variables", [GROUPS, {**ENV, "LOCAL_RANK": "1"}, {**ENV, "RANK": "0", "LOCAL_RANK": "0"}])
def test_values_equal_those_of_lightnings_environment(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch, stock = read(variables), TorchElasticEnvironment()
    assert (launch.rank, launch.local_rank) == (stock.global_rank(), stock.local_rank())
    assert (launch.world_size, launch.node_rank or 0) == (stock.world_size(), stock.node_rank())
    assert (launch.address, launch.port) == (stock.main_address, stock.main_port)
    assert LightningEnvironment().main_address == launch.address
    assert launch.externally_created and launch.launcher == "env" and launch.variables == variables


def test_values_without_a_variable_stay_unknown_unless_they_follow_from_the_local_world_size():
    launch = read(ENV)
    assert (launch.local_rank, launch.local_world_size, launch.num_nodes, launch.node_rank) == (None,) * 4
    assert not launch.is_single_machine and launch.evidence == "RANK=1 WORLD_SIZE=2" and launch.world_id == "env 29500"
    launch = read({**NODES, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "7"})
    assert (launch.num_nodes, launch.node_rank, launch.is_single_machine) == (1, 0, True)
    launch = read({"RANK": "1", "WORLD_SIZE": "2"}, address="flag", port=4000)
    assert (launch.address, launch.port, launch.world_id) == ("flag", 4000, "env 4000")
