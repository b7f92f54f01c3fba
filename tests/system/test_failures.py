"""A rank, a machine or its network is lost under real launchers: no process remains, and the next start resumes."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rankzero.checkpoints.manifest import checkpoints_in
from running import INTERPRETER_BIN, LIMIT, fit, processes_in, require, run, script, wait_until
from stock import differences
from system.forks import summary
from system.hosts import HOSTS, Hosts, kill_group, on
from system.learned import PYTHON, TORCHRUN
from system.test_exactly_once import CLASSES, learned_state

pytestmark = pytest.mark.xdist_group("failures")  # so that one worker trains `undisturbed`

TRAIN = (*CLASSES, "--model.pause", "0.02", "--data.count", "320", "--global_batch_size", "16")
TRAIN += ("--save_every", "5steps")


def ranks_in(folder: Path) -> list[psutil.Process]:
    """Returns the processes that train in a folder, sorted by process ID."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            is_training = script("fit") in command[:5] and "python" in Path(command[0]).name  # not torchrun or mpirun
            if process.cwd() == str(folder) and is_training:
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return sorted(found, key=lambda process: process.pid)


def has_checkpoint(folder: Path) -> bool:
    return len(checkpoints_in(folder / "runs/x/checkpoints")) > 1


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Returns the state that two ranks learn without a failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(Path(__file__).parent / "recording.py", folder)
    fit(*TRAIN, "--epochs", "4", "--run", "x", "--devices", "2", folder=folder)
    return learned_state(folder / "runs/x")


def start(folder: Path, *command: str) -> "subprocess.Popen[bytes]":
    """Starts a run with its output in the file `out`, and waits for its first checkpoints."""
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    wait_until(lambda: has_checkpoint(folder), "a checkpoint")
    return process


RESTARTED = (TORCHRUN, "--max-restarts", "3", "--nproc-per-node", "2", script("fit"), *TRAIN, "--run_name", "x")


def test_a_run_resumes_when_torchrun_restarts_its_workers_after_a_kill(user_folder, undisturbed):
    process = start(user_folder, *RESTARTED, "--epochs", "4")
    ranks_in(user_folder)[-1].kill()
    assert process.wait(LIMIT) == 0, (user_folder / "out").read_text()
    assert not ranks_in(user_folder)
    assert summary(user_folder)["attempts"] == 2
    assert not differences(undisturbed, learned_state(user_folder / "runs/x"))


LOCAL, ONE_PROCESS = ("python", script("fit"), "--devices", "2", "--run", "x"), ("python", script("fit"), "--run", "x")
UNDER_TORCHRUN = ("torchrun", "--nproc-per-node", "2", script("fit"), "--run_name", "x")


@pytest.mark.parametrize(
    ("command", "how", "message"),
    [
        (LOCAL, "_exit3", "exited with code 3 (os._exit) without an error report; stopping all ranks"),
        (LOCAL, "C_exit0", "exited with code 0 without an exit report; stopping the other processes"),
        (LOCAL, "segfault", "was killed by SIGSEGV; stopping the other processes"),
        (UNDER_TORCHRUN, "segfault", "was killed by SIGSEGV, see runs/x/logs/rank-001.log; stopping all ranks"),
        (ONE_PROCESS, "_exit3", "exited with code 3 (os._exit) without an error report"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 10 else "",
)
def test_a_rank_that_exits_without_a_report_fails_the_run_with_one_line(user_folder, command, how, message):
    is_single = command is ONE_PROCESS
    arguments = ("--trainer.callbacks", "recording.Fault", "--trainer.callbacks.rank", "0" if is_single else "1")
    result = run(*command, *TRAIN, *arguments, f"--trainer.callbacks.where=batch {how}", folder=user_folder, code=1)
    printed = re.sub(r", last seen in [a-z ]+ at step \d+", "", result.out + result.err)  # if the rank has reported it
    lines = [line for line in printed.splitlines() if line.startswith("rankzero: ")]
    reports = [line for line in lines if re.search("without an (error|exit) report|was killed|stopping", line)]
    subject = "this process" if is_single else f"rank 1 on {socket.gethostname()}"
    assert reports == [f"rankzero: {subject} {message}"]
    log = (user_folder / f"runs/x/logs/rank-00{0 if is_single else 1}.log").read_text()
    assert "in on_train_batch_end" in log or how == "C_exit0"
    assert summary(user_folder)["status"] == "failed"
    assert not processes_in(user_folder) and not (user_folder / "runs/.x.lock").exists()


@pytest.mark.soak
def test_a_stopped_run_stays_stopped_when_torchrun_restarts_it(user_folder):
    process = start(user_folder, *RESTARTED, "--epochs", "900")
    ranks_in(user_folder)[-1].send_signal(signal.SIGUSR1)
    assert process.wait(LIMIT) == 1
    stopped = summary(user_folder)
    assert (stopped["status"], stopped["attempts"]) == ("stopped", 1)
    assert "stopped at a safe point; it stays stopped" in (user_folder / "out").read_text()


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_mpirun_leaves_no_process_after_a_rank_is_killed(user_folder, undisturbed, mpi):
    require(mpi)
    launcher = {
        "openmpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"),
        "mpich": ("mpiexec.hydra", "-np", "2"),
    }[mpi]
    command = (*launcher, PYTHON, script("fit"), *TRAIN, "--epochs", "4", "--run", "x")
    process = start(user_folder, *command)
    ranks_in(user_folder)[-1].kill()
    assert process.wait(LIMIT) != 0
    wait_until(lambda: not ranks_in(user_folder), "the end of all ranks")
    run(*command, folder=user_folder)
    assert not differences(undisturbed, learned_state(user_folder / "runs/x"))


def start_on_both(hosts: Hosts, folder: Path) -> dict[str, "subprocess.Popen[bytes]"]:
    processes = {}
    for rank, host in enumerate(HOSTS):
        variables = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "rz1", "MASTER_PORT": "29520"}
        python = str(INTERPRETER_BIN / "python")  # a program would be suspended instead of its fork
        command = (python, script("fit"), *TRAIN, "--epochs", "900", "--run", "x")
        processes[host] = hosts.start(host, *command, folder=folder, log=folder / f"{host}.log", environment=variables)
    wait_until(lambda: has_checkpoint(folder), "a checkpoint")
    return processes


LINKS = (("rz1", HOSTS["rz2"], "to-rz2"), ("rz2", HOSTS["rz1"], "to-rz1"))


@pytest.mark.parametrize("how", ["a network that swallows packets", pytest.param("SIGSTOP", marks=pytest.mark.soak)])
def test_both_machines_exit_when_one_of_them_stops_responding(hosts, user_folder, how):
    processes = start_on_both(hosts, user_folder)
    try:
        if how == "SIGSTOP":
            ranks_in(user_folder)[-1].send_signal(signal.SIGSTOP)
            codes, message = {"rz1": 1, "rz2": -signal.SIGKILL}, r"was suspended \(SIGSTOP\)"
        else:
            time.sleep(5)  # until each rank has reported what it is doing
            for host, peer_address, link in LINKS:
                wrong_peer = (peer_address, "lladdr", "02:00:00:00:00:99", "dev", link, "nud", "permanent")
                on(host, "ip", "neigh", "replace", *wrong_peer)
            codes = {"rz1": 1, "rz2": 1}
            message = r"was lost \(Connection timed out\), last seen in .* at step \d+; stopping all ranks"
        assert {host: process.wait(LIMIT) for host, process in processes.items()} == codes
        assert re.search(message, "".join((user_folder / f"{host}.log").read_text() for host in HOSTS))
    finally:
        for host, peer_address, link in LINKS:
            with contextlib.suppress(subprocess.CalledProcessError):
                on(host, "ip", "neigh", "delete", peer_address, "dev", link)
        for process in processes.values():
            kill_group(process)
