from rankzero.distributed.environments.launch import RequestedWorld, Variables
from rankzero.distributed.environments.launchers import slurm
from recorded import STEP

UNEVEN = {**STEP, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}


def read(**changes):
    return slurm.read(Variables(UNEVEN | changes), RequestedWorld())


def test_nodes_may_have_different_numbers_of_tasks():
    launch = read()
    assert (launch.rank, launch.local_rank, launch.world_size, launch.node_rank) == (2, 0, 3, 1)
    assert (launch.num_nodes, launch.local_world_size, launch.processes_per_node) == (2, 1, (2, 1))
    assert launch.hosts == ("n1", "n2") and launch.address == "n1" and launch.job_id == "12"
    assert launch.shape == "2 nodes with 2 and 1 processes"


def test_no_two_jobs_steps_or_restarts_share_a_port():
    changes = {}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "13"}, {"SLURM_RESTART_COUNT": "1"}
    ports = {read(**change).port for change in changes}
    assert len(ports) == 4 and all(20000 <= port < 32768 for port in ports)
    assert read(MASTER_PORT="4000").port == 4000


def test_the_hosts_of_the_step_override_the_hosts_of_the_job_and_tasks_on_one_node_use_loopback():
    assert read(SLURM_STEP_NODELIST="gpu[07-09],gpu12", SLURM_NODELIST="gpu[01-20]").address == "gpu07"
    assert read(SLURM_STEP_NODELIST="", SLURM_NODELIST="gpu[01-20]").address == "gpu01"
    launch = read(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="3", SLURM_NODEID="0")
    assert launch.address == "127.0.0.1" and launch.is_single_machine


def test_host_lists_and_task_counts_are_expanded():
    hosts = {"": "", "n1": "n1", "n[1-3]": "n1 n2 n3", "a1,b[2-3],c": "a1 b2 b3 c", "n[08-10,12]": "n08 n09 n10 n12"}
    hosts |= {"rack[0-1]n[1-2]": "rack0n1 rack0n2 rack1n1 rack1n2", "gpu[1-2].site.org": "gpu1.site.org gpu2.site.org"}
    assert {text: slurm.expand_hosts(text) for text in hosts} == {text: tuple(hosts[text].split()) for text in hosts}
    assert slurm.expand_tasks("2(x3),1") == (2, 2, 2, 1) and slurm.expand_tasks("4") == (4,)
