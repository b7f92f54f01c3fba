"""A rank, a machine or its network is lost under real launchers: no process remains, and the next start resumes."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rankzero.runs.checkpoints.manifest import checkpoints_in
from running import BIN, REPOSITORY, require, run, script
from system import pbs
from system.hosts import HOSTS, Hosts, end, ip
from system.slurm import wait_until
from system.test_exactly_once import CLASSES, learned, same

PYTHON, TORCHRUN = str(BIN / "python"), str(BIN / "torchrun")

TRAIN = (
    *CLASSES,
    "--model.pause",
    "0.02",
    "--data.count",
    "320",
    "--global_batch_size",
    "16",
    "--save_every",
    "5steps",
)

pytestmark = pytest.mark.xdist_group("hosts")


def ranks_in(folder: Path) -> list[psutil.Process]:
    """Returns the processes that train in a folder, sorted by process ID."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            trains = words[1:2] == [script("fit")] or words[1:3] == ["-u", script("fit")]
            if process.cwd() == str(folder) and trains and "python" in Path(words[0]).name:
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return sorted(found, key=lambda process: process.pid)


def saved(folder: Path) -> bool:
    return len(checkpoints_in(folder / "runs/x/checkpoints")) > 1


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Returns the state that two ranks learn without a failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(Path(__file__).parent / "recording.py", folder)
    run(PYTHON, script("fit"), *TRAIN, "--epochs", "4", "--run", "x", "--devices", "2", folder=folder)
    return learned(folder / "runs/x")


def test_a_run_resumes_when_torchrun_restarts_its_workers_after_a_kill(mine, undisturbed):
    command = (TORCHRUN, "--max-restarts", "3", "--nproc-per-node", "2", script("fit"), *TRAIN)
    with (mine / "out").open("w") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [*command, "--epochs", "4", "--run_name", "x"]
        process = subprocess.Popen(arguments, cwd=mine, stdout=out, stderr=out, env=environment)
        wait_until(lambda: saved(mine), "a checkpoint", seconds=60)
        ranks_in(mine)[-1].kill()
        assert process.wait(100) == 0, (mine / "out").read_text()
    assert not ranks_in(mine)
    assert json.loads((mine / "runs/x/summary.json").read_text())["attempts"] == 2
    assert same(learned(mine / "runs/x"), undisturbed)


LEAVES = """
import ctypes
import os
from lightning.pytorch import Callback

class Leaves(Callback):
    def __init__(self, how: str, rank: int):
        self.how, self.rank = how, rank

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            if self.how == "segfault":
                ctypes.string_at(0)
            ctypes.CDLL(None)._exit(int(self.how)) if self.how.startswith("+") else os._exit(int(self.how))
"""

LOCAL, ALONE = (PYTHON, script("fit"), "--devices", "2", "--run", "x"), (PYTHON, script("fit"), "--run", "x")
UNDER_TORCHRUN = (TORCHRUN, "--nproc-per-node", "2", script("fit"), "--run_name", "x")


@pytest.mark.parametrize(
    ("command", "how", "says"),
    [
        (LOCAL, "3", "rank 1 on {host} ended with exit code 3 (os._exit) without a report; ending all"),
        (LOCAL, "+0", "rank 1 on {host} ended with exit code 0 without a report; ending the others"),
        (LOCAL, "segfault", "rank 1 on {host} was ended by SIGSEGV; ending the others"),
        (UNDER_TORCHRUN, "75", "rank 1 on {host} ended with exit code 75 (os._exit) without a report; ending all"),
        (UNDER_TORCHRUN, "segfault", "rank 1 on {host} was ended by SIGSEGV, see runs/x/logs/rank-001.log; ending all"),
        (ALONE, "3", "this process ended with exit code 3 (os._exit) without a report"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 10 else "",
)
def test_a_rank_that_exits_without_a_report_fails_the_run_with_one_line(mine, command, how, says):
    (mine / "leaves.py").write_text(LEAVES)
    alone = command is ALONE
    arguments = ("--trainer.callbacks", "leaves.Leaves", "--trainer.callbacks.rank", "0" if alone else "1")
    result = run(*command, *TRAIN, *arguments, f"--trainer.callbacks.how={how}", folder=mine, code=1)
    lines = [line for line in (result.out + result.err).splitlines() if line.startswith("rankzero: ")]
    said = [line for line in lines if "without a report" in line or "ended" in line or "ending" in line]
    assert said == ["rankzero: " + says.format(host=socket.gethostname())]
    log = (mine / f"runs/x/logs/rank-00{0 if alone else 1}.log").read_text()
    assert "in on_train_batch_end" in log or how.startswith("+")
    assert json.loads((mine / "runs/x/summary.json").read_text())["status"] == "failed"
    assert not ranks_in(mine) and not (mine / "runs/.x.lock").exists()


@pytest.mark.soak
def test_a_stopped_run_stays_stopped_when_torchrun_restarts_it(mine):
    command = (TORCHRUN, "--max-restarts", "1", "--nproc-per-node", "2", script("fit"), *TRAIN)
    with (mine / "out").open("w") as out:
        process = subprocess.Popen([*command, "--epochs", "900", "--run_name", "x"], cwd=mine, stdout=out, stderr=out)
        wait_until(lambda: saved(mine), "a checkpoint", seconds=60)
        ranks_in(mine)[-1].send_signal(signal.SIGUSR1)
        assert process.wait(60) == 1
    summary = json.loads((mine / "runs/x/summary.json").read_text())
    assert (summary["status"], summary["attempts"]) == ("stopped", 1)
    assert "asked to stop; it stays stopped" in (mine / "out").read_text()


@pytest.mark.parametrize("part", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_mpirun_leaves_no_process_after_a_rank_is_killed(mine, undisturbed, part):
    require(part)
    words = {
        "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
        "mpich": ("mpiexec.hydra", "-np", "2"),
    }[part]
    command = (*words, PYTHON, script("fit"), *TRAIN, "--epochs", "4", "--run", "x")
    with (mine / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=mine, stdout=out, stderr=out)
        wait_until(lambda: saved(mine), "a checkpoint", seconds=60)
        ranks_in(mine)[-1].kill()
        assert process.wait(40) != 0
    wait_until(lambda: not ranks_in(mine), "the end of all ranks", seconds=20)
    run(*command, folder=mine)
    assert same(learned(mine / "runs/x"), undisturbed)


def starts_on_both(hosts: Hosts, folder: Path) -> dict[str, "subprocess.Popen[bytes]"]:
    started = {}
    for rank, host in enumerate(HOSTS):
        place = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "rz1", "MASTER_PORT": "29520", "OMP_NUM_THREADS": "1"}
        command = (PYTHON, script("fit"), *TRAIN, "--epochs", "900", "--run", "x")
        started[host] = hosts.start(host, *command, folder=folder, log=folder / f"{host}.log", environment=place)
    wait_until(lambda: saved(folder), "a checkpoint", seconds=60)
    return started


LINKS = (("rz1", HOSTS["rz2"], "to-rz2"), ("rz2", HOSTS["rz1"], "to-rz1"))


@pytest.mark.parametrize("how", ["a network that swallows packets", pytest.param("SIGSTOP", marks=pytest.mark.soak)])
def test_both_machines_exit_when_one_of_them_stops_responding(hosts, mine, how):
    started = starts_on_both(hosts, mine)
    try:
        if how == "SIGSTOP":
            ranks_in(mine)[-1].send_signal(signal.SIGSTOP)
            codes, says = {"rz1": 1, "rz2": -signal.SIGKILL}, "was stopped (SIGSTOP)"
        else:
            for host, other, link in (("rz1", "10.93.0.2", "to-rz2"), ("rz2", "10.93.0.1", "to-rz1")):
                ip(
                    "-n",
                    host,
                    "neigh",
                    "replace",
                    other,
                    "lladdr",
                    "02:00:00:00:00:99",
                    "dev",
                    link,
                    "nud",
                    "permanent",
                )
            codes, says = {"rz1": 1, "rz2": 1}, "is gone (Connection timed out); ending all"
        assert {host: process.wait(30) for host, process in started.items()} == codes
        assert says in "".join((mine / f"{host}.log").read_text() for host in HOSTS)
    finally:
        for host, other, link in LINKS:
            subprocess.run(["ip", "-n", host, "neigh", "delete", other, "dev", link], capture_output=True)
        for process in started.values():
            end(process)


@pytest.mark.soak
def test_sigterm_on_the_first_host_of_a_pbs_job_stops_all_hosts(hosts, mine, undisturbed):
    """PBS sends SIGTERM only to the first host, so the test signals only the processes of that host."""
    (mine / "nodes").write_text("rz1\nrz2\n")
    page = (REPOSITORY / "docs/stopping.md").read_text()
    job = re.findall(r"^```bash\n(#!/bin/bash\n#PBS.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    (mine / "job.pbs").write_text(job.replace("--devices 2", f"--devices 1 {shlex.join(TRAIN)} --epochs 4"))
    pbsdsh = shlex.join([sys.executable, pbs.__file__, str(hosts.folder / "enter"), str(mine / "nodes")])
    programs = {"pbsdsh": f'exec {pbsdsh} "$PBS_JOBID" "$@"', "qsub": f'echo "$@" >>{mine}/submitted'}
    for name, line in programs.items():
        (mine / name).write_text(f"#!/bin/sh\n{line}\n")
        (mine / name).chmod(0o755)
    (mine / "launch").symlink_to(REPOSITORY / "launch")
    (mine / ".venv/bin").mkdir(parents=True)
    (mine / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
    (mine / ".venv/bin/python").chmod(0o755)
    variables = {**pbs.SCRIPT, "PBS_NODEFILE": str(mine / "nodes"), "HOME": str(mine), "OMP_NUM_THREADS": "1"}
    variables |= {"PBS_O_WORKDIR": str(mine), "PATH": f"{mine}:{os.environ['PATH']}"}

    def start(name):
        environment = {**os.environ, **variables, "PBS_JOBID": name}
        with (mine / "out").open("a") as out:
            return subprocess.Popen(["bash", "job.pbs"], cwd=mine, env=environment, stdout=out, stderr=out)

    def summary():
        return json.loads((mine / "runs/my-run/summary.json").read_text())

    first = start("0.rz1")
    wait_until(lambda: len(checkpoints_in(mine / "runs/my-run/checkpoints")) > 1, "a checkpoint", seconds=60)
    inside = subprocess.run(["ip", "netns", "pids", "rz1"], capture_output=True, text=True, check=True)
    for pid in [*map(int, inside.stdout.split()), first.pid]:
        os.kill(pid, signal.SIGTERM)
    first.wait(30)
    assert (mine / "submitted").read_text() == "job.pbs\n"
    assert summary()["status"] == "stopped" and summary()["another_attempt"]
    assert (mine / "out").read_text().count("pbsdsh: task exited with 75") == 2
    start("1.rz1").wait(60)
    assert summary()["status"] == "finished" and (mine / "submitted").read_text() == "job.pbs\n"
    (mine / "runs/my-run").rename(mine / "runs/x")
    assert same(learned(mine / "runs/x"), undisturbed)
