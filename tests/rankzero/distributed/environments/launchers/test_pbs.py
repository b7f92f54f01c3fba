"""The variables were recorded in real jobs of OpenPBS 23.06 on two hosts."""

import pytest

from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import pbs

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
    return Variables(variables if node == "0" else variables | {"PBS_NODEFILE": node_file})


def test_the_job_script_is_not_a_task():
    assert not pbs.found(Variables(SCRIPT))
    assert all(pbs.found(task(line, "")) for line in range(4))


def test_flags_set_the_number_of_tasks_and_the_rendezvous_assigns_their_ranks(node_file):
    launches = [pbs.read(task(line, node_file), TWO_NODES) for line in range(4)]
    assert [launch.rank for launch in launches] == [None] * 4
    assert [launch.node_rank for launch in launches] == [0, 0, 1, 1]
    assert all(launch.world_size == 4 and launch.num_nodes == 2 for launch in launches)
    assert launches[0].rank_order < launches[1].rank_order and launches[2].rank_order < launches[3].rank_order
    assert {launch.port for launch in launches} == {launches[0].port}
    assert launches[2].address == launches[3].address == "pbs1"  # the node file is set on the second host only


def test_a_rank_from_the_tasks_command_line_is_used(node_file):
    launch = pbs.read(task(2, node_file, RANK="2", WORLD_SIZE="4", LOCAL_RANK="0"), RequestedWorld())
    assert (launch.rank, launch.local_rank, launch.node_rank, launch.world_size) == (2, 0, 1, 4)


def test_a_task_without_a_rank_or_a_number_of_tasks_is_refused():
    with pytest.raises(KeyError, match="RANK"):
        pbs.read(task(0, ""), RequestedWorld())


def test_tasks_on_one_machine_rendezvous_on_loopback(node_file):
    launch = pbs.read(task(1, node_file), RequestedWorld(nodes=1, devices=2))
    assert launch.address == "127.0.0.1" and launch.num_nodes == 1


@pytest.mark.parametrize(
    ("job", "name"),
    [("18.pbs1", "18.pbs1"), ("15[3].pbs1", "15-3.pbs1"), ("15[].pbs1", "15-.pbs1"), ("../../etc/x y", "etc-x-y")],
)
def test_the_job_id_is_a_valid_folder_name(job, name):
    assert pbs.job_id(Variables({"PBS_JOBID": job})) == name
