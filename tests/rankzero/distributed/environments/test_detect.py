import sys

import recorded
from rankzero.cli.trainer_arguments import as_arguments
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.environments.validate import processes_to_start
from recorded import ENV, FLUX, KUBEFLOW, LOCAL, OPEN_MPI, OPEN_MPI_5, PBS_SCRIPT, PBS_TASK, SBATCH, STEP, TORCHRUN
from running import refusal_of

TWO_TASKS = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
DAEMONS = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_MCA_orte_local_daemon_uri": "1.1;tcp://b:1"}
STANDALONE = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
STANDALONE["TORCHELASTIC_RUN_ID"] = "221830f4-58ef-4bbe-9de5-a47d32b1b98b"
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SALLOC = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}


def refusal(environ, launcher="auto", **requested):
    return refusal_of(detect, RequestedWorld(launcher=launcher, **requested), environ)


def test_each_launcher_is_detected_by_its_own_variables():
    mpi = OPEN_MPI, recorded.JSRUN | {"MASTER_ADDR": "a"}, recorded.PALS | {"PMI_SIZE": "4", "MASTER_ADDR": "a"}
    others = {"local": LOCAL, "torchrun": TORCHRUN, "slurm": STEP, "pbs": PBS_TASK, "env": ENV, "flux": FLUX}
    for launcher, variables in [*others.items(), *(("mpi", variables) for variables in mpi)]:
        launch = detect(environ=variables)
        assert launch.launcher == launcher and launch.externally_created
        assert launch.variables and set(launch.variables.items()) <= set(variables.items())


def test_the_most_specific_launcher_takes_precedence():
    for outer, inner, launcher in (
        *[(TWO_TASKS, TORCHRUN, "torchrun"), (STEP, LOCAL, "local"), (SBATCH, TORCHRUN, "torchrun")],
        *[(SBATCH, ENV, "env"), (SBATCH, OPEN_MPI, "mpi"), (PBS_SCRIPT, OPEN_MPI, "mpi")],
        (TWO_TASKS, OPEN_MPI | DAEMONS, "mpi"),  # the Slurm step of mpirun's daemons is no outer launcher
        (TWO_TASKS, OPEN_MPI_5 | {"PMIX_SERVER_URI2": "prterun-a-9@0.1;tcp4://127.0.0.1:5"}, "mpi"),
        (SALLOC, {"SLURM_STEP_ID": "4294967290"}, "local"),  # the shell of salloc
        (SALLOC, {"SLURM_STEP_ID": "4294967291"}, "local"),  # the batch script
        (STEP, {"PMI_RANK": "2", "PMI_SIZE": "4", "PMIX_RANK": "2"}, "slurm"),
        (STEP, {"WORLD_SIZE": "4", "MASTER_ADDR": "n1"}, "slurm"),
        *[
            (STEP, FLUX, "flux"),
            (FLUX, recorded.PALS, "flux"),
            (FLUX, OPEN_MPI, "mpi"),
            (KUBEFLOW, TORCHRUN, "torchrun"),
        ],
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {}, "local"),
    ):
        assert detect(environ=outer | inner).launcher == launcher, (outer, inner)


def test_a_launcher_in_each_of_several_tasks_is_refused():
    four_nodes = STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    same_daemon = {"OMPI_MCA_orte_hnp_uri": "x", "OMPI_MCA_orte_local_daemon_uri": "x"}
    in_step = (STEP | inner for inner in (TORCHRUN, OPEN_MPI | same_daemon, OPEN_MPI_5))
    for variables in (*in_step, four_nodes | STANDALONE, OPEN_MPI | TORCHRUN):
        assert "each would start a separate run" in refusal(variables).found


def test_a_container_on_each_machine_starts_the_processes_of_its_machine():
    for variables, requested, shape in (
        (KUBEFLOW, {}, (2, 2, 2)),  # rank, machines, processes on each
        (KUBEFLOW | {"RANK": "1", "WORLD_SIZE": "4"}, {}, (2, 2, 2)),  # a PyTorchJob
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "gpu"}, {"devices": 3}, (3, 2, 3)),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "gpu", "PET_NNODES": "2:2"}, {"devices": 3}, (3, 2, 3)),
        (ENV, {"nodes": 2, "devices": 4}, (4, 2, 4)),
        (INDEXED_JOB, {"nodes": 2, "devices": 4}, (4, 2, 4)),
    ):
        launch = detect(RequestedWorld(**requested), environ=variables)
        assert (launch.rank, launch.num_nodes, launch.local_world_size, launch.node_rank) == (*shape, 1)
        assert (launch.launcher, launch.address, launch.port) == ("local", "a", 29500) and not launch.externally_created
        assert processes_to_start(RequestedWorld(**requested), launch) == shape[2]


def test_containers_that_contradict_the_request_or_change_their_number_are_refused():
    assert refusal(KUBEFLOW, nodes=3).args == ("--nodes 3", "PET_NNODES=2 machines", "--nodes 2, or omit it")
    assert "torchrun" in refusal(KUBEFLOW | {"PET_NNODES": "1:4"}).instead
    assert refusal({"JOB_COMPLETION_INDEX": "1"}, nodes=2).found == "--master_addr is not set"
    assert detect(environ=INDEXED_JOB).world_size == 1  # each index is a separate run
    assert detect(RequestedWorld(nodes=2), environ=ENV | INDEXED_JOB).launcher == "env"


def test_a_batch_script_for_several_tasks_without_srun_is_refused():
    error = refusal(SBATCH)
    assert "no task has been started" in error.found and "srun --nodes=2 --ntasks-per-node=2" in error.instead
    assert "srun --nodes=2 --ntasks-per-node=8" in refusal(SBATCH, nodes=2, devices=8).instead
    launch = detect(environ={"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1"})
    assert launch.launcher == "local" and "SLURM_JOB_ID=12 without a SLURM_STEP_ID" in launch.evidence


def test_a_requested_launcher_or_node_rank_may_not_contradict_the_variables():
    assert detect(RequestedWorld(launcher="local"), environ=SBATCH).world_size == 1
    assert "no task" in refusal(SBATCH, "local", nodes=2).found
    single_task = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert detect(RequestedWorld(launcher="local"), environ=STEP | single_task).launcher == "local"
    assert "not started by torchrun" in refusal({}, "torchrun").found
    assert detect(RequestedWorld(launcher="slurm"), environ=STEP | ENV).launcher == "slurm"
    assert detect(RequestedWorld(node_rank=1), environ=STEP).launcher == "slurm"
    assert "started this process on node 1" in refusal(STEP, node_rank=0).found


def test_the_position_of_a_single_process_is_complete_under_each_launcher_without_an_address():
    for variables in (
        "PBS_JOBID=0.pbs1 PBS_TASKNUM=00000002 PBS_NODENUM=0",
        "PBS_JOBID=15[3].pbs1 PBS_TASKNUM=00000002 PBS_NODENUM=0 RANK=0 WORLD_SIZE=1",
        *("RANK=0 WORLD_SIZE=1", "RANK=0 WORLD_SIZE=1 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 GROUP_RANK=3"),
        *("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "PMI_RANK=0 PMI_SIZE=1", "PMIX_RANK=0"),
        "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
        "TORCHELASTIC_RUN_ID=a RANK=0 LOCAL_RANK=0 WORLD_SIZE=1",
    ):
        launch = detect(RequestedWorld(nodes=1, devices=1), environ=recorded.variables(variables))
        assert (launch.rank, launch.local_rank, launch.node_rank) == (0, 0, 0) and launch.externally_created
        assert (launch.world_size, launch.local_world_size, launch.num_nodes) == (1, 1, 1)


def test_a_pbs_script_for_several_nodes_without_a_launcher_is_refused(tmp_path):
    nodes = tmp_path / "nodes"
    variables = PBS_SCRIPT | {"PBS_NODEFILE": str(nodes)}
    nodes.write_text("pbs1\npbs1\npbs2\npbs2\n")
    error = refusal(variables)
    assert "job of 2 nodes and 4 tasks" in error.asked
    assert error.instead.splitlines()[:2] == [
        f'mpirun -np 4 --hostfile "$PBS_NODEFILE" {sys.executable} launch/fit.py ...',
        f'or pbsdsh -- {sys.executable} "$PWD/launch/fit.py" --root "$PWD/runs" ...',
    ]
    nodes.write_text("pbs1\npbs1\n")  # two cores of one machine
    assert detect(environ=variables).launcher == "local"


def test_incomplete_or_invalid_variables_are_refused():
    for variables, missing in (
        *[({"RANK": "1"}, "WORLD_SIZE is not set"), ({"WORLD_SIZE": "2"}, "RANK is not set")],
        ({"LOCAL_RANK": "0"}, "RANK is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        (ENV | {"RANK": "2"}, "rank 2 is not below 2"),
        *((ENV | {"RANK": rank}, f"RANK='{rank}' is not a whole number") for rank in ("-1", "one")),
        (ENV | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (ENV | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number >= 0"),
        (ENV | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "local rank 3 is not below 2"),
        ({name: value for name, value in TORCHRUN.items() if name != "WORLD_SIZE"}, "WORLD_SIZE is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, "PMIX_SIZE is not set"),
        ({"PBS_JOBID": "1", "PBS_TASKNUM": "zz"}, "PBS_TASKNUM='zz'"),
        ({"PBS_JOBID": "1", "PBS_TASKNUM": "2", "PBS_NODENUM": "0"}, "RANK is not set"),
    ):
        assert missing in refusal(variables).found


def test_machines_joined_by_hand_with_incomplete_flags_are_refused():
    assert "--nodes is not set" in refusal({}, node_rank=0).found
    assert "--node_rank is not set" in refusal({}, nodes=2, address="a").found
    for environ in ({}, {"MASTER_PORT": "1"}):
        assert "--master_addr is not set" in refusal(environ, nodes=2, node_rank=0).found
    assert "--master_port is not set" in refusal({"MASTER_ADDR": "a"}, nodes=2, node_rank=0).found
    assert "--master_port is not set" in refusal({}, nodes=2, node_rank=0, address="a").found
    assert "not below" in refusal({}, nodes=2, node_rank=2, address="a", port=1).found


def test_without_variables_the_launch_is_one_local_process_and_two_nodes_are_refused(monkeypatch):
    assert detect(environ={}) == Launch()
    error = refusal({}, nodes=2, devices=4)
    assert "no launcher's variables are set" in error.found
    assert error.instead.splitlines() == [
        "srun --nodes=2 --ntasks-per-node=4 python launch/fit.py ...",
        "or torchrun --nnodes 2 --nproc-per-node 4 ... launch/fit.py ... on each machine",
        "or the same command on each machine with --node_rank 0 (then 1, ...) --master_addr HOST --master_port PORT",
    ]
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert as_arguments(refusal({}, nodes=2).instead).splitlines() == [
        "srun --nodes=2 --ntasks-per-node=D python train.py ...",
        "or torchrun --nnodes 2 --nproc-per-node D ... train.py ... on each machine",
        "or the same script on each machine with node_rank=0 (then 1, ...) master_addr=HOST master_port=PORT",
    ]
