"""A real Slurm on this machine: slurmctld, and two slurmd for the nodes n1 and n2."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from running import LIMIT, wait_until

CONFIG = """\
ClusterName=rankzero
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MinJobAge=300
KillWait=15
SlurmdTimeout=20
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=8 RealMemory=2000 Gres=gpu:2
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP
PartitionName=main Default=YES OverSubscribe=YES PriorityTier=1
PartitionName=patient PriorityTier=1 GraceTime=20
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the cluster, and yields the environment variables for srun, sbatch and squeue. Needs root."""
    add_node_names()
    first_port = find_free_ports(3)
    (folder / "state").mkdir(parents=True)
    config = folder / "slurm.conf"
    # These GPUs do not exist. Tests only check how Slurm starts tasks that request GPUs.
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n")
    ports = {"ctld_port": first_port, "first_port": first_port + 1, "last_port": first_port + 2}
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **ports))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (folder / f"{Path(command[0]).name}-{len(daemons)}.out").open("wb")
        daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge_files = (f"--key-file={key}", *(f"--{name}={folder}/munge.{name[:-5]}" for name in ("pid-file", "seed-file")))
    try:
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge_files)
        wait_until(lambda: (folder / "munge.socket").exists(), "munged")
        start("slurmctld", "-D", "-f", str(config))
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node, "-f", str(config))
        wait_until(lambda: _idle_node_count(environment) == 2, "slurmctld and two slurmd")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for node in ("n1", "n2"):  # a slurmd that restart_slurmd started is not in `daemons`
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                _slurmd_process(node, environment).kill()


def add_node_names() -> None:
    """Makes the names n1 and n2 resolve, as in a real cluster."""
    hosts = Path("/etc/hosts")
    if "n1 n2" not in hosts.read_text():
        with hosts.open("a") as file:
            file.write("127.0.0.1 n1 n2\n")


def submit(script: Path, environment: dict[str, str], *options: str) -> tuple[str, str]:
    """Submits a batch script and waits for its end; returns the job's id and output."""
    job = start(script, environment, *options)
    return job, wait_for(job, script.parent, environment)


def start(script: Path, environment: dict[str, str], *options: str) -> str:
    """Submits a batch script; returns the job's id."""
    command = ["sbatch", "--parsable", "--open-mode=append", f"--output={script.parent}/%j.out", *options, str(script)]
    process = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=True)
    return process.stdout.strip()


def wait_for(job: str, folder: Path, environment: dict[str, str], seconds: float = LIMIT) -> str:
    """Waits until a job has ended and is not requeued; returns the output of all its attempts."""
    wait_until(lambda: not state(job, environment), f"the end of job {job}", seconds)
    return (folder / f"{job}.out").read_text()


def state(job: str, environment: dict[str, str]) -> str:
    """Returns a job's state, such as RUNNING, or an empty string after its end."""
    listing = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    return subprocess.run(listing, env=environment, capture_output=True, text=True).stdout.strip()


def run_slurm_command(*command: str, environment: dict[str, str]) -> None:
    """Runs scontrol or scancel, and raises an error if the command fails."""
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def kill_node(node: str, environment: dict[str, str]) -> None:
    """Kills a node's slurmd, steps and tasks at once, as a power cut does."""
    tasks = [process for process in psutil.process_iter() if _runs_on(process, node, environment)]
    steps = {parent for task in tasks if (parent := task.parent()) and parent.name() == "slurmstepd"}
    for process in [_slurmd_process(node, environment), *steps, *tasks]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_slurmd(node: str, environment: dict[str, str]) -> None:
    """Kills only a node's slurmd: its tasks continue until Slurm marks the node as down."""
    _slurmd_process(node, environment).kill()


def restart_slurmd(node: str, environment: dict[str, str]) -> None:
    """Starts a node's slurmd again."""
    subprocess.run(["slurmd", "-N", node, "-f", environment["SLURM_CONF"]], env=environment, check=True)
    wait_until(lambda: _idle_node_count(environment) == 2, f"slurmd on {node}")


def _slurmd_process(node: str, environment: dict[str, str]) -> psutil.Process:
    file = Path(environment["SLURM_CONF"]).parent / f"slurmd-{node}.pid"
    return psutil.Process(int(file.read_text()))


def _runs_on(process: psutil.Process, node: str, environment: dict[str, str]) -> bool:
    """Returns whether a process is a task, a job script or a child of one, on this node of this cluster."""
    try:
        variables = process.environ()
    except psutil.Error:
        return False
    return variables.get("SLURMD_NODENAME") == node and variables.get("SLURM_CONF") == environment["SLURM_CONF"]


def find_free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports."""
    for first in range(17000, 19000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError("no free ports between 17000 and 19000")


def _idle_node_count(environment: dict[str, str]) -> int:
    command = [shutil.which("sinfo") or "sinfo", "--noheader", "--Node", "--partition=main", "--format=%t"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    return process.stdout.split().count("idle")
