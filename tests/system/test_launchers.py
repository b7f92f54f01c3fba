"""Runs every row of the table of launchers with the real launcher, and without preloaded programs.

Each row learns the same weights, to 1e-6, uses each sample once, and leaves no process.
"""

import os
import sys
from pathlib import Path

import pytest

from running import INTERPRETER_BIN, require, run
from system import pbs
from system.hosts import HOSTS, kill_group
from system.learned import TRAIN, check
from system.slurm import wait_until

pytestmark = pytest.mark.xdist_group("hosts")

PYTHON, TORCHRUN = str(INTERPRETER_BIN / "python"), str(INTERPRETER_BIN / "torchrun")
TWO_NODES = ("--nodes", "2", "--devices", "1")


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("local", (PYTHON, *TRAIN, "--devices", "2")),
        ("torchrun", (TORCHRUN, "--standalone", "--nproc-per-node", "2", *TRAIN)),
        ("torchrun", (PYTHON, "-m", "torch.distributed.launch", "--nproc-per-node", "2", *TRAIN)),
    ],
    ids=["local", "torchrun --standalone", "torch.distributed.launch"],
)
def test_two_processes_on_one_machine_learn_as_one_process(tmp_path, reference, launcher, command):
    result = run(*command, folder=tmp_path)
    check(tmp_path, result.out + result.err, reference, launcher, (2,))


def test_ranks_started_with_rank_variables_learn_as_one_process(tmp_path, reference, hosts):
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "rz1", "MASTER_PORT": "29501"}
    commands = {host: ["env", f"RANK={rank}", PYTHON, *TRAIN] for rank, host in enumerate(HOSTS)}
    results = hosts.run_on_both(tmp_path, commands, environment=variables)
    assert [code for code, _ in results.values()] == [0, 0], results
    check(tmp_path, "".join(text for _, text in results.values()), reference, "env", (1, 1))


def test_two_machines_started_with_flags_learn_as_one_process(tmp_path, reference, hosts):
    rendezvous = ("--nodes", "2", "--devices", "2", "--master_addr", "rz1", "--master_port", "29502")
    commands = {host: [PYTHON, *TRAIN, *rendezvous, "--node_rank", str(node)] for node, host in enumerate(HOSTS)}
    results = hosts.run_on_both(tmp_path, commands)
    assert [code for code, _ in results.values()] == [0, 0], results
    check(tmp_path, "".join(text for _, text in results.values()), reference, "local", (2, 2))


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_two_machines_learns_as_one_process(tmp_path, reference, hosts, kind):
    def command(node):
        if kind == "static":
            rendezvous = ["--node-rank", str(node), "--master-addr", "rz1", "--master-port", "29503"]
        else:
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "rz1:29504", "--rdzv-id", "job"]
        return [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *TRAIN, *TWO_NODES]

    results = hosts.run_on_both(tmp_path, {host: command(node) for node, host in enumerate(HOSTS)})
    assert [code for code, _ in results.values()] == [0, 0], results
    check(tmp_path, "".join(text for _, text in results.values()), reference, "torchrun", (1, 1))


MPIRUN = {
    "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", "{agent}", "-H", "{slots}"),
    "mpich": ("mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", "{slots}"),
}


@pytest.mark.parametrize(("mpi", "per_host"), [("openmpi", 2), ("mpich", 1)])
def test_mpirun_on_two_machines_learns_as_one_process_without_mpi4py(tmp_path, reference, hosts, mpi, per_host):
    require(mpi)
    slots = ",".join(f"{host}:{per_host}" for host in HOSTS)
    launcher = [argument.format(agent=hosts.agent, slots=slots) for argument in MPIRUN[mpi]]
    command = [*launcher, "-np", str(2 * per_host), PYTHON, *TRAIN, "--nodes", "2", "--devices", str(per_host)]
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap/mpi4py.py").write_text("raise SystemExit('mpi4py was imported')")
    results = hosts.run_on_both(tmp_path, {"rz1": command}, environment={"PYTHONPATH": str(tmp_path / "trap")})
    assert results["rz1"][0] == 0, results
    check(tmp_path, results["rz1"][1], reference, "mpi", (per_host, per_host))


NODES = "rz1\nrz2\n"
NO_QSTAT = (
    "rankzero: the time limit of job 0.rz1 is unknown (qstat: not found on PATH); set --time_limit to stop before it"
)


@pytest.fixture
def job(tmp_path, hosts):
    """Returns the command line of the pbsdsh replacement, and the job script's variables, for a job on two hosts."""
    node_file = tmp_path / "0.rz1"
    node_file.write_text(NODES)
    pbsdsh = [sys.executable, pbs.__file__, str(hosts.folder / "enter"), str(node_file), "0.rz1"]
    return pbsdsh, {**pbs.SCRIPT, "PBS_JOBID": "0.rz1", "PBS_NODEFILE": str(node_file), "HOME": str(tmp_path)}


def test_pbsdsh_without_rank_variables_learns_as_one_process(tmp_path, reference, job):
    pbsdsh, variables = job
    result = run(*pbsdsh, "--", PYTHON, *TRAIN, *TWO_NODES, folder=tmp_path, environment=variables)
    summary = check(tmp_path, result.out + result.err, reference, "pbs", (1, 1), NO_QSTAT)
    assert summary["run"] == "MLP-Toy-0.rz1"


def test_pbsdsh_with_rank_variables_in_its_command_learns_as_one_process(tmp_path, reference, job):
    pbsdsh, variables = job
    shared = "WORLD_SIZE=2 MASTER_ADDR=rz1 MASTER_PORT=29505"
    lines = [
        f"{' '.join(pbsdsh)} -n {rank} -- env RANK={rank} {shared} {PYTHON} {' '.join(TRAIN)} &" for rank in range(2)
    ]
    result = run("sh", "-c", "\n".join([*lines, "wait"]), folder=tmp_path, environment=variables)
    check(tmp_path, result.out + result.err, reference, "pbs", (1, 1), NO_QSTAT)


def test_pbsdsh_with_a_torchrun_on_each_host_learns_as_one_process(tmp_path, reference, job):
    pbsdsh, variables = job
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "rz1:29506", "--rdzv-id", "0.rz1")
    command = (TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *TRAIN)
    result = run(*pbsdsh, "--", *command, folder=tmp_path, environment=variables)
    check(tmp_path, result.out + result.err, reference, "torchrun", (1, 1), NO_QSTAT)


def test_mpirun_in_a_pbs_script_learns_as_one_process(tmp_path, reference, hosts, job):
    require("openmpi")
    launcher = [argument.format(agent=hosts.agent, slots="rz1:1,rz2:1") for argument in MPIRUN["openmpi"]]
    results = hosts.run_on_both(tmp_path, {"rz1": [*launcher, "-np", "2", PYTHON, *TRAIN]}, environment=job[1])
    summary = check(tmp_path, results["rz1"][1], reference, "mpi", (1, 1), NO_QSTAT)
    assert summary["run"] == "MLP-Toy-0.rz1"


def test_two_processes_on_one_machine_listen_only_on_loopback(tmp_path, hosts):
    command = (PYTHON, *TRAIN, "--devices", "2", "--epochs", "1000")
    process = hosts.start("rz1", *command, folder=tmp_path, log=tmp_path / "log")
    try:
        addresses = listening_addresses(tmp_path / "log", "rz1")
    finally:
        kill_group(process)
    assert addresses and all(address.startswith(("127.", "[::1]")) for address in addresses), addresses


def test_two_machines_listen_only_on_the_interface_between_them(tmp_path, hosts):
    flags = ("--nodes", "2", "--devices", "1", "--master_addr", "rz1", "--master_port", "29507", "--epochs", "1000")
    processes = [
        hosts.start(host, PYTHON, *TRAIN, *flags, "--node_rank", str(node), folder=tmp_path, log=tmp_path / host)
        for node, host in enumerate(HOSTS)
    ]
    try:
        addresses = listening_addresses(tmp_path / "rz1", "rz1")
    finally:
        for process in processes:
            kill_group(process)
    assert f"{HOSTS['rz1']}:29507" in addresses
    assert all(address.startswith(HOSTS["rz1"]) for address in addresses), addresses


def listening_addresses(log: Path, host: str) -> list[str]:
    """Waits until training has started, and returns the addresses on which the host listens."""
    wait_until(lambda: log.exists() and "epoch " in log.read_text(), "training")
    found = run("ip", "netns", "exec", host, "ss", "-Hltn", folder=Path("/"))
    return [line.split()[3] for line in found.out.splitlines()]


def test_the_environment_of_the_tests_has_no_launcher_variables():
    assert not {"RANK", "WORLD_SIZE", "SLURM_JOB_ID", "PBS_JOBID", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
