"""The variables were recorded in real jobs of OpenPBS 23.06 on two hosts."""

import pytest

from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import pbs
from rankzero.distributed.environments.validate import check_world
from running import refusal_of

SCRIPT = {"PBS_JOBID": "0.pbs1", "PBS_TASKNUM": "1", "PBS_NODENUM": "0", "PBS_NODEFILE": "/var/spool/pbs/aux/0.pbs1"}
TASKS = [("0", "00000002"), ("0", "00000003"), ("1", "20000001"), ("1", "20000002")]
TWO_NODES = RequestedWorld(nodes=2, devices=2)


@pytest.fixture
def node_file(tmp_path):
    path = tmp_path / "0.pbs1"
    path.write_text("pbs1\npbs1\npbs2\npbs2\n")
    return str(path)


def task(line, node_file, **rank_variables):
    node, number = TASKS[line]
    variables = {"PBS_JOBID": "0.pbs1", "PBS_NODENUM": node, "PBS_TASKNUM": number, **rank_variables}
    return variables if node == "0" else variables | {"PBS_NODEFILE": node_file}


def test_the_job_script_is_not_a_task():
    assert not pbs.found(Variables(SCRIPT))
    assert all(pbs.found(Variables(task(line, ""))) for line in range(4))


def test_flags_set_the_number_of_tasks_and_the_rendezvous_assigns_their_ranks(node_file):
    launches = [detect(TWO_NODES, task(line, node_file)) for line in range(4)]
    assert [launch.rank for launch in launches] == [None] * 4
    assert [launch.node_rank for launch in launches] == [0, 0, 1, 1]
    assert all(launch.world_size == 4 and launch.num_nodes == 2 for launch in launches)
    assert {launch.port for launch in launches} == {launches[0].port}
    assert launches[2].address == launches[3].address == "pbs1"  # the node file is set on the second host only
    launch = detect(RequestedWorld(nodes=1, devices=2), task(1, node_file))  # on one machine
    assert launch.address == "127.0.0.1" and launch.num_nodes == 1


def test_a_rank_from_the_tasks_command_line_is_used_also_beside_a_node_file(node_file, mom):
    launch = detect(environ=task(2, node_file, RANK="2", WORLD_SIZE="4", LOCAL_RANK="0"))
    assert (launch.rank, launch.local_rank, launch.node_rank, launch.world_size) == (2, 0, 1, 4)
    mom.write_text("pbs1\n" * 4)
    launch = detect(environ=task(0, node_file, RANK="0", WORLD_SIZE="2"))
    assert (launch.world_size, launch.processes_per_node) == (2, None)


@pytest.fixture
def mom(tmp_path, monkeypatch):
    """Makes the node file readable on the first host, in the folder of the MoM."""
    (tmp_path / "pbs.conf").write_text(f"PBS_SERVER=pbs1\nPBS_HOME={tmp_path}\n")
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    (tmp_path / "aux").mkdir()
    return tmp_path / "aux" / "0.pbs1"


@pytest.mark.parametrize("requested", [RequestedWorld(), TWO_NODES, RequestedWorld(nodes=2, devices=3)])
def test_all_tasks_read_the_number_of_tasks_from_the_node_file(mom, node_file, requested):
    mom.write_text("pbs1\npbs2\npbs1\npbs2\n")
    launches = [detect(requested, task(line, node_file)) for line in range(4)]
    assert {(launch.world_size, launch.num_nodes, launch.processes_per_node) for launch in launches} == {(4, 2, (2, 2))}
    assert {launch.hosts for launch in launches} == {("pbs1", "pbs2")}


def test_chunks_packed_on_one_host_are_one_machine(mom):
    mom.write_text("pbs1\n" * 4)
    launch = detect(TWO_NODES, task(0, ""))
    assert (launch.shape, launch.address) == ("1 node x 4 processes", "127.0.0.1")
    error = refusal_of(check_world, TWO_NODES, launch)
    assert error.found.startswith("pbs started 1 node x 4 processes")
    assert error.instead == (
        "--nodes 1 --devices 4, or omit both\n"
        "or qsub -l select=2:ncpus=2:mpiprocs=2 -l place=scatter ..., for other tasks"
    )
    check_world(RequestedWorld(nodes=1, devices=4), detect(RequestedWorld(nodes=1, devices=4), task(0, "")))


def test_a_job_id_becomes_a_valid_folder_name_and_with_a_slash_names_no_node_file(mom):
    mom.write_text("pbs1\n")
    assert pbs.node_file(Variables({"PBS_JOBID": "0.pbs1"})) == ["pbs1"]
    assert pbs.node_file(Variables({"PBS_JOBID": "../aux/0.pbs1"})) == []
    assert detect(TWO_NODES, task(0, "") | {"PBS_JOBID": "15[3].pbs1"}).job_id == "15-3.pbs1"


def test_a_setting_is_read_from_the_file_that_a_variable_names_if_it_is_valid(tmp_path, monkeypatch):
    file = tmp_path / "pbs.conf"
    monkeypatch.setenv("PBS_CONF_FILE", str(file))
    assert pbs.pbs_setting("PBS_EXEC") is None
    for content in (b"\xff\xfe", b"", b"no setting"):
        file.write_bytes(content)
        assert pbs.pbs_setting("PBS_EXEC") is None
    file.write_text("PBS_SERVER=pbs1\nPBS_EXEC=/opt/pbs\n  PBS_HOME=/var/spool/pbs  \nPBS_START_MOM=\n")
    assert [pbs.pbs_setting(name) for name in ("PBS_EXEC", "PBS_HOME")] == ["/opt/pbs", "/var/spool/pbs"]
    assert pbs.pbs_setting("PBS_START_MOM") is None and pbs.pbs_setting("PBS_LEAF_NAME") is None
