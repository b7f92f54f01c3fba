"""Runs every row of the table in docs/launchers.md with the real launcher, and without preloaded programs.

Each row learns the same weights, to 1e-6, uses each sample once, requires a common key, divides the cores of a machine,
listens only on the interface between the machines, exits with 0, and leaves no process.
"""

import os
from pathlib import Path

import pytest

import system.learned
from rankzero.distributed.process.system import usable_cores
from running import INTERPRETER_BIN, require, run, write_program
from system.hosts import HOSTS
from system.learned import OBSERVE, observed
from system.pbs_server import SCRIPT, install

PYTHON, TORCHRUN = str(INTERPRETER_BIN / "python"), str(INTERPRETER_BIN / "torchrun")
TWO_NODES = ("--nodes", "2", "--devices", "1")
CORES = len(usable_cores())
TRAIN = (*system.learned.TRAIN, "--auth", "required", *OBSERVE)


def check(folder, printed, reference, launcher, shape, *also_printed, listens_everywhere=False):
    """Checks all that a row promises; returns the run's summary and the addresses on which rank zero listened."""
    summary = system.learned.check(folder, printed, reference, launcher, shape, *also_printed)
    threads, reason, listening = observed(folder, printed)
    assert set(threads) == {max(1, CORES // sum(shape))} and reason.endswith(f" / {sum(shape)} ranks"), reason
    for rank, addresses in enumerate(listening):
        interface = "127.0.0.1" if len(shape) == 1 else HOSTS["rz1" if rank < shape[0] else "rz2"]
        allowed = {interface, "0.0.0.0"} if listens_everywhere and rank == 0 else {interface}
        assert addresses and {ip for ip, _ in addresses} <= allowed, listening
    return summary, listening[0]


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("local", (PYTHON, *TRAIN, "--devices", "2")),
        ("torchrun", (TORCHRUN, "--standalone", "--nproc-per-node", "2", *TRAIN)),
        ("torchrun", (PYTHON, "-m", "torch.distributed.launch", "--nproc-per-node", "2", *TRAIN)),
    ],
    ids=["local", "torchrun --standalone", "torch.distributed.launch"],
)
def test_two_processes_on_one_machine_learn_as_one_process(cores_shared, reference, launcher, command):
    result = run(*command, folder=cores_shared)
    check(cores_shared, result.out + result.err, reference, launcher, (2,))


PLATFORMS = {
    "env": "env RANK={rank} WORLD_SIZE=2 MASTER_ADDR=rz1 MASTER_PORT=29501",
    "pet": "local PET_NNODES=2 PET_NODE_RANK={rank} PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=rz1 PET_MASTER_PORT=29503",
    "flux": "flux FLUX_JOB_ID=f1 FLUX_JOB_NNODES=2 FLUX_JOB_SIZE=2 FLUX_TASK_RANK={rank} FLUX_TASK_LOCAL_ID=0",
    "pals": "mpi PALS_RANKID={rank} PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=1 PBS_NODEFILE=nodes",
    "jsrun": "mpi JSM_NAMESPACE_RANK={rank} JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=0 LSB_DJOB_RANKFILE=ranks",
}
"""Platform -> the launcher that it counts as, and the variables of one of its processes."""


@pytest.mark.parametrize("platform", PLATFORMS)
def test_processes_that_a_platform_has_started_learn_as_one_process(cores_shared, reference, hosts, platform):
    (cores_shared / "nodes").write_text("rz1\nrz2\n")
    (cores_shared / "ranks").write_text("batch\nrz1\nrz2\n")
    job_info = """echo '{"execution": {"nodelist": ["rz[1-2]"]}}'"""
    write_program(cores_shared / "flux", f"[ $2 = timeleft ] && echo 4294967295 || {job_info}")  # no time limit
    path = f"PATH={cores_shared}:{os.environ['PATH']}"
    launcher, *variables = PLATFORMS[platform].split()
    variables = [[variable.format(rank=rank) for variable in variables] for rank in range(2)]
    commands = {host: ["env", path, *variables[rank], PYTHON, *TRAIN] for rank, host in enumerate(HOSTS)}
    printed = hosts.run_on_both(cores_shared, commands)
    check(cores_shared, "".join(printed), reference, launcher, (2, 2) if launcher == "local" else (1, 1))


def test_two_machines_started_with_flags_learn_as_one_process(cores_shared, reference, hosts):
    rendezvous = ("--nodes", "2", "--devices", "2", "--master_addr", "rz1", "--master_port", "29502")
    commands = {host: [PYTHON, *TRAIN, *rendezvous, "--node_rank", str(node)] for node, host in enumerate(HOSTS)}
    printed = "".join(hosts.run_on_both(cores_shared, commands))
    _, listening = check(cores_shared, printed, reference, "local", (2, 2))
    assert (HOSTS["rz1"], 29502) in listening


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_two_machines_learns_as_one_process(cores_shared, reference, hosts, kind):
    def command(node):
        if kind == "static":
            rendezvous = ["--node-rank", str(node), "--master-addr", "rz1", "--master-port", "29503"]
        else:
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "rz1:29504", "--rdzv-id", "job"]
        return [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *TRAIN, *TWO_NODES]

    printed = hosts.run_on_both(cores_shared, {host: command(node) for node, host in enumerate(HOSTS)})
    check(cores_shared, "".join(printed), reference, "torchrun", (1, 1))


MPIRUN = {
    "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", "{agent}", "-H", "{slots}"),
    "mpich": ("mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", "{slots}"),
}


@pytest.mark.parametrize(("mpi", "per_host"), [("openmpi", 2), ("mpich", 1)])
def test_mpirun_on_two_machines_learns_as_one_process_without_mpi4py(cores_shared, reference, hosts, mpi, per_host):
    require(mpi)
    slots = ",".join(f"{host}:{per_host}" for host in HOSTS)
    launcher = [argument.format(agent=hosts.agent, slots=slots) for argument in MPIRUN[mpi]]
    command = [*launcher, "-np", str(2 * per_host), PYTHON, *TRAIN, "--nodes", "2", "--devices", str(per_host)]
    (cores_shared / "trap").mkdir()
    (cores_shared / "trap/mpi4py.py").write_text("raise SystemExit('mpi4py was imported')")
    variables = {"PYTHONPATH": str(cores_shared / "trap")}
    (printed,) = hosts.run_on_both(cores_shared, {"rz1": command}, environment=variables)
    # Open MPI's variables contain two addresses of rz1; MPICH's proxy listens, and its processes inherit the socket.
    check(cores_shared, printed, reference, "mpi", (per_host, per_host), listens_everywhere=True)


NO_QSTAT = (
    "rankzero: the time limit of job 0.rz1 is unknown (qstat: not found on PATH); set --time_limit to stop before it"
)


@pytest.fixture
def job(tmp_path, hosts):
    """Returns the program pbsdsh of the PBS replacement, and the job script's variables, for a job on two hosts."""
    node_file = tmp_path / "0.rz1"
    node_file.write_text("rz1\nrz2\n")
    variables = {"PBS_JOBID": "0.rz1", "PBS_NODEFILE": str(node_file), "HOME": str(tmp_path)}
    return str(install(hosts, tmp_path / "server") / "pbsdsh"), SCRIPT | variables


def test_pbsdsh_without_rank_variables_learns_as_one_process(cores_shared, reference, job):
    pbsdsh, variables = job
    Path(variables["PBS_NODEFILE"]).write_text("rz1\nrz1\nrz2\nrz2\n")
    command = (pbsdsh, "--", PYTHON, *TRAIN, "--nodes", "2", "--devices", "2")
    result = run(*command, folder=cores_shared, environment=variables)
    printed = result.out + result.err
    summary, _ = check(cores_shared, printed, reference, "pbs", (2, 2), NO_QSTAT, listens_everywhere=True)
    assert summary["run"] == "MLP-Toy-0.rz1"


def test_pbsdsh_with_rank_variables_in_its_command_learns_as_one_process(cores_shared, reference, job):
    pbsdsh, variables = job
    shared = "WORLD_SIZE=2 MASTER_ADDR=rz1 MASTER_PORT=29505"
    lines = [f"{pbsdsh} -n {rank} -- env RANK={rank} {shared} {PYTHON} {' '.join(TRAIN)} &" for rank in range(2)]
    result = run("sh", "-c", "\n".join([*lines, "wait"]), folder=cores_shared, environment=variables)
    check(cores_shared, result.out + result.err, reference, "pbs", (1, 1), NO_QSTAT, listens_everywhere=True)


def test_pbsdsh_with_a_torchrun_on_each_host_learns_as_one_process(cores_shared, reference, job):
    pbsdsh, variables = job
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "rz1:29506", "--rdzv-id", "0.rz1")
    command = (TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *TRAIN)
    result = run(pbsdsh, "--", *command, folder=cores_shared, environment=variables)
    check(cores_shared, result.out + result.err, reference, "torchrun", (1, 1), NO_QSTAT)


def test_mpirun_in_a_pbs_script_learns_as_one_process(cores_shared, reference, hosts, job):
    require("openmpi")
    launcher = [argument.format(agent=hosts.agent, slots="rz1:1,rz2:1") for argument in MPIRUN["openmpi"]]
    command = [*launcher, "-np", "2", PYTHON, *TRAIN]
    (printed,) = hosts.run_on_both(cores_shared, {"rz1": command}, environment=job[1])
    summary, _ = check(cores_shared, printed, reference, "mpi", (1, 1), NO_QSTAT)
    assert summary["run"] == "MLP-Toy-0.rz1"
