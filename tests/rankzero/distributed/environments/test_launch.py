import sys

import pytest

from rankzero.distributed.environments import launch as module
from rankzero.distributed.environments.launch import Launch, RequestedWorld, Variables, derived_port


def test_the_shape_states_nodes_and_processes_and_one_machine_is_recognized():
    for launch, shape, is_single_machine in (
        *[(Launch(), "1 node x 1 process", True), (Launch(world_size=4), "1 node x 4 processes", True)],
        (Launch(world_size=2, num_nodes=1, local_world_size=None), "1 node x 2 processes", True),
        (Launch(world_size=2, num_nodes=2), "2 nodes x 1 process", False),
        (Launch(world_size=6, num_nodes=3), "3 nodes x 2 processes", False),
        (Launch(world_size=1, num_nodes=None), "1 process", True),
        (Launch(world_size=3, num_nodes=None), "3 processes", False),
        (Launch(world_size=2, num_nodes=None, local_world_size=2), "2 processes", True),
        (Launch(world_size=2, num_nodes=None, local_world_size=None), "2 processes", False),
        (Launch(world_size=3, num_nodes=2, processes_per_node=(2, 1)), "2 nodes with 2 and 1 processes", False),
        (Launch(world_size=6, num_nodes=3, processes_per_node=(3, 2, 1)), "3 nodes with 3, 2 and 1 processes", False),
        (Launch(world_size=4, num_nodes=2, processes_per_node=(2, 2)), "2 nodes x 2 processes", False),
    ):
        assert (launch.shape, launch.is_single_machine) == (shape, is_single_machine)


def test_an_empty_variable_counts_as_unset_and_only_variables_that_were_read_are_recorded():
    variables = Variables({"A": "", "B": " ", "C": "c"})
    assert ["A" in variables, "B" in variables, "C" in variables, "D" in variables] == [False, True, True, False]
    assert [variables.find(name) for name in "ABCD"] == [None, " ", "c", None]
    for name in "AD":
        for read in (variables.text, variables.number):
            with pytest.raises(KeyError, match=name):
                read(name)
    assert variables.find_number("A") is None
    variables = Variables({"A": "007", "B": "4294967290", "C": "", "D": "3"})
    assert "D" in variables and variables.number("A") == 7 and variables.find_number("B") == 4294967290
    variables.find("C"), variables.find_number("nothing")
    assert variables.recorded == {"A": "007", "B": "4294967290"}


@pytest.mark.parametrize("text", ["-1", "+1", "1.0", "1e3", "0x10", "1_000", " 1", "1\n", "one", "٣", "²"])
def test_an_invalid_number_is_refused_with_its_name_and_value(text):
    with pytest.raises(ValueError) as caught:
        Variables({"A": text}).number("A")
    assert str(caught.value) == f"A={text!r} is not a whole number >= 0"
    with pytest.raises(ValueError, match=r"digits"):
        Variables({"A": "9" * (sys.get_int_max_str_digits() + 1)}).number("A")


def test_every_key_gives_a_port_from_20000_to_32767_that_is_the_same_in_every_process_and_version():
    assert [derived_port(fixed) for fixed in ("", "env", "slurm 12.0")] == [25762, 28575, 26291]
    ports = [derived_port(f"{number} ä\0{'x' * number}") for number in range(5000)]
    assert 20000 <= min(ports) < 20010 and 32757 < max(ports) < 32768


def endpoint_of(environ=None, host=None, **requested):
    return module.rendezvous_endpoint(Variables(environ or {}), RequestedWorld(**requested), host, "key")


def test_flags_override_variables_and_variables_override_the_launchers_host():
    environ = {"MASTER_ADDR": "variable", "MASTER_PORT": "1"}
    assert endpoint_of(environ, "host", address="flag", port=2) == ("flag", 2)
    assert endpoint_of(environ, "host") == ("variable", 1)
    assert endpoint_of({}, "host") == ("host", derived_port("key"))
    assert endpoint_of({"MASTER_ADDR": "", "MASTER_PORT": ""}, "host") == ("host", derived_port("key"))
    assert endpoint_of({"MASTER_PORT": "65535"}, "host") == ("host", 65535)
    with pytest.raises(ValueError, match=r"^MASTER_PORT=65536 is not a port \(1 to 65535\)$"):
        endpoint_of({"MASTER_PORT": "65536"}, "host")
    with pytest.raises(KeyError, match="MASTER_ADDR"):
        endpoint_of({"MASTER_PORT": "1"})


def test_a_job_id_becomes_a_valid_folder_name():
    names = {"12": "12", "18.pbs1": "18.pbs1", "15[3].pbs1": "15-3.pbs1", "15[].pbs1": "15-.pbs1", "x" * 100: "x" * 64}
    names |= {"../../etc/x y": "etc-x-y", ".hidden": "hidden", "--name": "name", "a\0b\nc": "ab-c"}
    names |= dict.fromkeys((None, "", "...", "[]", "ä"))
    assert {job: module.folder_name(job) for job in names} == names
