"""A real Slurm on this machine: slurmctld and two slurmd, nodes n1 and n2."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIG = """\
ClusterName=rankzero
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MinJobAge=300
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
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the cluster; yields the environment in which srun, sbatch and squeue find it. Needs root."""
    name_the_nodes()
    first_port = free_ports(3)
    (folder / "state").mkdir(parents=True)
    config = folder / "slurm.conf"
    # GPUs that Slurm hands out but nobody can use: what counts here is how it starts tasks for them.
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n")
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(),
            folder=folder,
            ctld_port=first_port,
            first_port=first_port + 1,
            last_port=first_port + 2,
        )
    )
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (folder / f"{Path(command[0]).name}-{len(daemons)}.out").open("wb")
        daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = (
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munged.seed",
    )
    try:
        start(*munge)
        wait_until(lambda: (folder / "munge.socket").exists(), "munged")
        start("slurmctld", "-D", "-f", str(config))
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node, "-f", str(config))
        wait_until(lambda: _idle(environment) == 2, "slurmctld and two slurmd")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def name_the_nodes() -> None:
    """Lets n1 and n2 resolve, as the nodes of a real cluster do."""
    hosts = Path("/etc/hosts")
    if "n1 n2" not in hosts.read_text():
        with hosts.open("a") as file:
            file.write("127.0.0.1 n1 n2\n")


def submit(script: Path, environment: dict[str, str], *options: str) -> tuple[str, str]:
    """Submits a batch script and waits for its end; returns the job's id and what it printed."""
    command = ["sbatch", "--parsable", f"--output={script.parent}/%j.out", *options, str(script)]
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, check=True)
    job_id = done.stdout.strip()
    listing = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]

    def ended() -> bool:
        return not subprocess.run(listing, env=environment, capture_output=True, text=True).stdout.strip()

    wait_until(ended, f"job {job_id}", seconds=120)
    return job_id, (script.parent / f"{job_id}.out").read_text()


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    for first in range(17000, 19000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError("no free ports between 17000 and 19000")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start within {seconds} s")
        time.sleep(0.2)


def _idle(environment: dict[str, str]) -> int:
    command = [shutil.which("sinfo") or "sinfo", "--noheader", "--Node", "--format=%t"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    return answer.stdout.split().count("idle")
