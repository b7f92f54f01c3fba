"""Attackers on the network, and other users of the machine, cannot change a run."""

import contextlib
import os
import re
import subprocess
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


@pytest.fixture
def attack(hosts, tmp_path) -> Iterator[Path]:
    """Attacks all ports of rz1 from a third host, also with what rz2 has sent; the log of the attack."""
    log, recording = tmp_path / "attack.log", tmp_path / "recording"
    recorder = hosts.start("rz1", *PROGRAM, "record", "to-rz2", str(recording), folder=tmp_path, log=log)
    command = (*PROGRAM, "attack", HOSTS["rz1"], PORT, str(recording))
    attacker = hosts.start(ATTACKER, *command, folder=tmp_path, log=log)
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


def test_a_run_under_attack_finishes_although_an_attacker_claims_its_rank_1_first(hosts, attack, tmp_path):
    rendezvous = ("--nodes", "2", "--devices", "1", "--master_addr", "rz1", "--master_port", PORT, "--run", "x")
    command = (PYTHON, *TRAIN, "--epochs", "60", *rendezvous, "--node_rank")
    logs = [tmp_path / f"{host}.log" for host in HOSTS]
    with contextlib.ExitStack() as stack:
        processes = []
        for node, host in enumerate(HOSTS):
            processes.append(hosts.start(host, *command, str(node), folder=tmp_path, log=logs[node]))
            stack.callback(kill_group, processes[node])
            if node == 0:
                wait_until(lambda: attack_count(attack) >= 50, "50 attacks on rank zero")
        codes = [process.wait(120) for process in processes]
    printed = "".join(log.read_text() for log in logs)
    assert codes == [0, 0] and "Traceback" not in printed and "not authenticated" not in printed, printed
    written = summary(tmp_path, "x")
    assert written["status"] == "finished" and written["epochs"] == 60
    assert "attacking port" in attack.read_text()  # the scan has found the control channel


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
