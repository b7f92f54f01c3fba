import pytest

from rankzero.cli.script_arguments import as_arguments
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.messages import RequestError
from recorded import ENV, LOCAL, OPEN_MPI, PBS_SCRIPT, PBS_TASK, SBATCH, STEP, TORCHRUN


def refusal(environ, launcher="auto", **requested):
    with pytest.raises(RequestError) as caught:
        detect(RequestedWorld(launcher=launcher, **requested), environ)
    return caught.value


def test_without_variables_the_launch_is_one_local_process():
    assert detect(environ={}) == Launch()


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (LOCAL, "local"),
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "mpi"),
        (STEP, "slurm"),
        (PBS_TASK, "pbs"),
        (ENV, "env"),
    ],
)
def test_each_launcher_is_detected_by_its_own_variables(variables, launcher):
    launch = detect(environ=variables)
    assert launch.launcher == launcher and launch.externally_created
    assert launch.variables and set(launch.variables.items()) <= set(variables.items())


@pytest.mark.parametrize(
    ("outer", "inner", "launcher"),
    [
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, TORCHRUN, "torchrun"),
        (STEP, LOCAL, "local"),
        (SBATCH, TORCHRUN, "torchrun"),
        (SBATCH, ENV, "env"),
        (SBATCH, OPEN_MPI, "mpi"),
        (PBS_SCRIPT, OPEN_MPI, "mpi"),
        (STEP, {"PMI_RANK": "2", "PMI_SIZE": "4", "PMIX_RANK": "2"}, "slurm"),
        (STEP, {"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, "slurm"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}, "local"),
    ],
)
def test_the_most_specific_launcher_takes_precedence(outer, inner, launcher):
    assert detect(environ=outer | inner).launcher == launcher


def test_the_slurm_step_of_mpiruns_daemons_is_no_outer_launcher():
    step = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    daemons = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_MCA_orte_local_daemon_uri": "1.1;tcp://b:1"}
    assert detect(environ=step | OPEN_MPI | daemons).launcher == "mpi"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (STEP, TORCHRUN),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, TORCHRUN | {
            "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "221830f4-58ef-4bbe-9de5-a47d32b1b98b"}),
        (OPEN_MPI, TORCHRUN),
        (STEP, OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_MCA_orte_local_daemon_uri": "x"}),
    ],
)  # fmt: skip
def test_a_launcher_in_each_of_several_tasks_is_refused(outer, inner):
    assert "each would start a separate run" in refusal(outer | inner).found


def test_a_batch_script_for_several_tasks_without_srun_is_refused():
    error = refusal(SBATCH)
    assert "no task has been started" in error.found and "srun --nodes=2 --ntasks-per-node=2" in error.instead
    assert "srun --nodes=2 --ntasks-per-node=8" in refusal(SBATCH, nodes=2, devices=8).instead
    launch = detect(environ={"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1"})
    assert launch.launcher == "local" and "SLURM_JOB_ID=12 without a SLURM_STEP_ID" in launch.evidence


def test_launcher_local_allows_one_process_in_a_batch_script():
    assert detect(RequestedWorld(launcher="local"), environ=SBATCH).world_size == 1
    assert "no task" in refusal(SBATCH, "local", nodes=2).found


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_the_shell_of_salloc_and_the_batch_script_are_no_tasks(step):
    variables = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_STEP_ID": step, "SLURM_PROCID": "0"}
    assert detect(environ=variables).launcher == "local"


def test_a_pbs_script_for_several_nodes_without_a_launcher_is_refused(tmp_path):
    nodes = tmp_path / "nodes"
    variables = PBS_SCRIPT | {"PBS_NODEFILE": str(nodes)}
    nodes.write_text("pbs1\npbs1\npbs2\npbs2\n")
    error = refusal(variables)
    assert "job of 2 nodes and 4 tasks" in error.asked and "--nodes 2 --devices 2" in error.instead
    nodes.write_text("pbs1\npbs1\n")  # two cores of one machine
    assert detect(environ=variables).launcher == "local"


def test_launcher_local_in_one_of_several_tasks_is_refused():
    for variables in (STEP, OPEN_MPI, ENV):
        assert "each would start a separate run" in refusal(variables, "local").found
    single_task = STEP | {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }
    assert detect(RequestedWorld(launcher="local"), environ=single_task).launcher == "local"


def test_a_requested_launcher_without_its_variables_is_refused():
    assert "not started by torchrun" in refusal({}, "torchrun").found
    assert detect(RequestedWorld(launcher="slurm"), environ=STEP | ENV).launcher == "slurm"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"LOCAL_RANK": "0"}, "RANK is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        (ENV | {"RANK": "2"}, "rank 2 is not below 2"),
        (ENV | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (ENV | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (ENV | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (ENV | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "local rank 3 is not below 2"),
        ({name: value for name, value in TORCHRUN.items() if name != "WORLD_SIZE"}, "WORLD_SIZE is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, "PMIX_SIZE is not set"),
        ({"PBS_JOBID": "1", "PBS_TASKNUM": "zz"}, "PBS_TASKNUM='zz'"),
        ({"PBS_JOBID": "1", "PBS_TASKNUM": "2", "PBS_NODENUM": "0"}, "RANK is not set"),
    ],
)
def test_incomplete_or_invalid_variables_are_refused(variables, missing):
    assert missing in refusal(variables).found


@pytest.mark.parametrize(
    ("requested", "missing"),
    [
        ({"node_rank": 0}, "--nodes is not set"),
        ({"nodes": 2, "address": "a"}, "--node_rank is not set"),
        ({"nodes": 2, "node_rank": 0}, "--master_addr is not set"),
        ({"nodes": 2, "node_rank": 0, "address": "a"}, "--master_port is not set"),
        ({"nodes": 2, "node_rank": 2, "address": "a", "port": 1}, "not below"),
    ],
)
def test_machines_joined_by_hand_with_incomplete_flags_are_refused(requested, missing):
    assert missing in refusal({}, **requested).found


def test_two_nodes_without_a_launcher_are_refused():
    error = refusal({}, nodes=2, devices=4)
    assert "no launcher's variables are set" in error.found
    assert error.instead.splitlines() == [
        "srun --nodes=2 --ntasks-per-node=4 python launch/fit.py ...",
        "or torchrun --nnodes 2 --nproc-per-node 4 ... launch/fit.py ... on each machine",
        "or the same command on each machine with --node_rank 0 (then 1, ...) --master_addr HOST --master_port PORT",
    ]


def test_commands_in_a_refusal_stay_commands_in_a_script(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    commands = as_arguments(refusal({}, nodes=2).instead).splitlines()
    assert commands == [
        "srun --nodes=2 --ntasks-per-node=D python train.py ...",
        "or torchrun --nnodes 2 --nproc-per-node D ... train.py ... on each machine",
        "or the same command on each machine with node_rank=0 (then 1, ...) master_addr=HOST master_port=PORT",
    ]


def test_a_node_rank_that_contradicts_the_launcher_is_refused():
    assert detect(requested=RequestedWorld(node_rank=1), environ=STEP).launcher == "slurm"
    assert "started this process on node 1" in refusal(STEP, node_rank=0).found
