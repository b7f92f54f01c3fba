"""Attackers on the network, and other users of the machine, cannot change a run."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from running import REPOSITORY, wait_until
from system.forks import summary
from system.hosts import ATTACKER, HOSTS, kill_group
from system.learned import PYTHON, TORCHRUN, TRAIN

pytestmark = pytest.mark.timeout(480)

PORT = "29561"
OTHER_USER = 65534
PROGRAM = (PYTHON, str(REPOSITORY / "tests/system/attacks.py"))
LONG = ("--epochs", "100000")


@contextlib.contextmanager
def attacked(hosts, folder: Path, seed: int = 0) -> Iterator[Path]:
    """Attacks all ports of rz1 from a third host, also with what rz2 has sent; yields the log of the attack."""
    log, recording = folder / "attack.log", folder / "recording"
    recorder = hosts.start("rz1", *PROGRAM, "record", "to-rz2", str(recording), folder=folder, log=log)
    command = (*PROGRAM, "attack", HOSTS["rz1"], PORT, str(recording), str(seed))
    attacker = hosts.start(ATTACKER, *command, folder=folder, log=log)
    try:
        wait_until(lambda: attack_count(log) >= 0, "the attack")
        yield log
        assert attacker.poll() is None and recorder.poll() is None, log.read_text()
        assert recording.read_text().count("\n") > 10
    finally:
        kill_group(attacker)
        kill_group(recorder)


def attack_count(log: Path) -> int:
    """Returns the number of attacks that the log states last, or -1 before the first number."""
    return int((re.findall(r"(\d+) attacks\n", log.read_text()) or ["-1"])[-1])


@pytest.fixture
def attack(hosts, tmp_path):
    """An attack from before the start of a run until its end; the log of the attack."""
    with attacked(hosts, tmp_path) as log:
        yield log


class Run:
    """A run on two hosts, joined by hand."""

    def __init__(self, hosts, folder: Path, *flags: str) -> None:
        self.hosts, self.folder, self.flags = hosts, folder, flags
        self.logs = {host: folder / f"{host}.log" for host in HOSTS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *started_hosts: str) -> "Run":
        """Starts the ranks on some hosts, or on both."""
        rendezvous = ("--nodes", "2", "--devices", "1", "--master_addr", "rz1", "--master_port", PORT, "--run", "x")
        for host in started_hosts or HOSTS:
            command = (PYTHON, *TRAIN, *rendezvous, "--node_rank", str([*HOSTS].index(host)), *self.flags)
            self.processes[host] = self.hosts.start(host, *command, folder=self.folder, log=self.logs[host])
        return self

    def wait_for_training(self) -> None:
        later_epoch = re.compile(r"epoch ([2-9]|\d\d)")  # not every epoch has a line
        wait_until(lambda: later_epoch.search(self.printed()) or self.has_ended(), "the second epoch")
        assert not self.has_ended(), self.printed()

    def has_ended(self) -> bool:
        return any(process.poll() is not None for process in self.processes.values())

    def codes(self) -> list[int]:
        return [process.wait(120) for process in self.processes.values()]

    def printed(self) -> str:
        return "".join(log.read_text() for log in self.logs.values())

    def close(self) -> None:
        for process in self.processes.values():
            kill_group(process)


@pytest.fixture
def new_run(hosts, tmp_path):
    """Returns a function that creates a run on two hosts with these flags."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(contextlib.closing(Run(hosts, tmp_path, *flags)))


def test_a_run_under_attack_finishes_although_an_attacker_claims_its_rank_1_first(attack, new_run, tmp_path):
    run = new_run("--epochs", "60").start("rz1")
    wait_until(lambda: attack_count(attack) >= 50, "50 attacks on rank zero")
    assert run.start("rz2").codes() == [0, 0], run.printed()
    written = summary(tmp_path, "x")
    assert written["status"] == "finished" and written["epochs"] == 60
    assert "Traceback" not in run.printed() and "not authenticated" not in run.printed()
    assert "attacking port" in attack.read_text()  # the scan has found the control channel


def test_a_run_under_attack_is_stopped_by_a_signal(attack, new_run, tmp_path):
    run = new_run(*LONG).start()
    run.wait_for_training()
    run.processes["rz2"].send_signal(signal.SIGTERM)
    assert run.codes() == [75, 75], run.printed()
    assert summary(tmp_path, "x")["status"] == "stopped"
    assert run.printed().count("SIGTERM: stopping after this step") == 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_runs_under_attack_for_half_an_hour(hosts, tmp_path):
    """Runs that finish, are stopped or lose a rank, each under an attack with another seed."""
    generator, ends, attacks = random.Random(20), Counter(), 0
    deadline = time.monotonic() + float(os.environ.get("RANKZERO_SOAK_SECONDS", "1800"))
    while time.monotonic() < deadline:
        number = ends.total()
        folder = tmp_path / str(number)
        folder.mkdir()
        end = ("finish", "stop", "kill")[number % 3]
        with attacked(hosts, folder, number) as log, contextlib.closing(Run(hosts, folder, *LONG)) as run:
            run.start().wait_for_training()
            time.sleep(generator.uniform(0, 30))
            assert not run.has_ended(), run.printed()
            if end == "kill":
                run.processes["rz2"].kill()
            else:
                run.processes[generator.choice(("rz1", "rz2"))].send_signal(signal.SIGTERM)
            assert run.codes() == ([1, -signal.SIGKILL] if end == "kill" else [75, 75]), run.printed()
            if end == "finish":
                run.flags = ("--trainer.max_steps", str(summary(folder, "x")["steps"] + 50), *LONG)
                assert run.start().codes() == [0, 0], run.printed()
        ends[end] += 1
        attacks += attack_count(log)
        print(f"{dict(ends)}, {attacks} attacks", flush=True)
    assert ends and attacks > 100 * ends.total()


KEY_READER = "import sys; print(open(sys.argv[1], 'rb').read())"

LOCAL_ATTACK = """
import json, re, socket
names = {line.split()[-1] for line in open("/proc/net/unix") if "@rankzero" in line}
for name in names:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(5)
    try:
        connection.connect("\\0" + name[1:])
        received = connection.recv(100)
        connection.sendall(b"0" * 32 + b" -\\n")
        for message in ({"rank": 1}, {"rank": 1, "stop": "x"}, {"rank": 1, "failed": "x"}):
            connection.sendall(json.dumps(message).encode() + b"\\n")
        print("received", received)
    except OSError as error:
        print("refused", error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="acting as another user needs root")
def test_another_user_of_the_machine_can_neither_read_the_key_nor_use_the_sockets(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    environment.pop("XDG_CONFIG_HOME", None)
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", *TRAIN]
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):  # so that only the mode of the key protects it
        folder.chmod(folder.stat().st_mode | 0o755)
    key, log = tmp_path / "home/.config/rankzero/key", tmp_path / "log"
    with log.open("wb") as out:
        run = subprocess.Popen([*command, "--epochs", "120"], cwd=tmp_path, env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: "epoch 1/120 done" in log.read_text() or run.poll() is not None, "training")
        assert run.poll() is None, log.read_text()
        assert "Permission denied" in as_other_user(KEY_READER, str(key)) and key.read_bytes()
        printed = as_other_user(LOCAL_ATTACK)
        assert "refused" in printed or "received b''" in printed
        assert "RANKZERO" not in printed
        assert run.wait(200) == 0, log.read_text()
    finally:
        run.kill()


def as_other_user(program: str, *arguments: str) -> str:
    """Returns what a program prints that another user runs."""
    command = ["/usr/bin/python3", "-c", program, *arguments]
    result = subprocess.run(command, user=OTHER_USER, group=OTHER_USER, extra_groups=[], capture_output=True, text=True)
    return result.stdout + result.stderr
