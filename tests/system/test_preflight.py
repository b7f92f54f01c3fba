"""The preflight under real launchers passes, and names faults that are planted on one of two hosts."""

import json
import re
import shutil
import socket
import subprocess
import sysconfig

import pytest

from rankzero.preflight.check import CHECK_NAMES
from running import REPOSITORY, disk_at, require, run, script
from system.hosts import HOSTS, on
from system.learned import PYTHON, TORCHRUN
from system.test_launchers import MPIRUN

CHECKED = ("--model", "MLP", "--data", "Toy", "--json", "preflight.json")
PREFLIGHT = (script("preflight"), *CHECKED)
FAULTY = (str(REPOSITORY / "tests/scripts/faulty.py"), "preflight", *CHECKED)


def by_hand(node, *flags):
    rendezvous = ("--master_addr", "rz1", "--master_port", "29531")
    return ["--nodes", "2", "--devices", "1", "--node_rank", str(node), *rendezvous, *flags]


def start(hosts, folder, *flags, command=PREFLIGHT, first=(), second=(), code=0):
    """Runs a command on both hosts, checks its exit code, and returns the output of each host.

    `command` is the script and its flags, or a pair of these; `first` and `second` are words before it on each host.
    """
    scripts = command if isinstance(command[0], tuple) else (command, command)
    commands = {
        host: [*prefix, PYTHON, *scripts[node], *by_hand(node, *flags)]
        for node, (host, prefix) in enumerate(zip(HOSTS, (first, second), strict=True))
    }
    return hosts.run_on_both(folder, commands, code=code)


def fault(name):
    """Returns the arguments of `start` that plant a fault on the second host."""
    return {"command": FAULTY, "second": ("env", f"FAULT={name}")}


def statuses(folder):
    """Returns the status of each check in the JSON file, and whether the machines are fit to train."""
    content = json.loads((folder / "preflight.json").read_text())
    assert [check["name"] for check in content["checks"]] == list(CHECK_NAMES)
    assert bool(content["thresholds"]) is (content["checks"][1]["status"] != "fail")
    return {check["name"]: check["status"] for check in content["checks"]}, content["fit_to_train"]


def check_passes(folder, printed, hosts_names):
    found, fit = statuses(folder)
    assert fit and "fail" not in found.values(), printed
    assert [name for name, status in found.items() if status == "skipped"] == ["GPUs", "nccl messages"], printed
    assert "verdict: fit to train" in printed
    for rank, host in enumerate(hosts_names[1:], 1):
        assert f"rank {rank} on {host} received data from rank 0" in printed
    assert not list(folder.glob("runs/.preflight*"))


def test_the_preflight_passes_under_slurm_on_two_nodes(slurm, tmp_path):
    result = run("srun", "--nodes=2", "--ntasks-per-node=1", "python", *PREFLIGHT, folder=tmp_path, environment=slurm)
    check_passes(tmp_path, result.out, [socket.gethostname()] * 2)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_preflight_passes_under_mpirun_on_two_hosts(tmp_path, hosts, mpi):
    require(mpi)
    launcher = [argument.format(agent=hosts.agent, slots="rz1:2,rz2:2") for argument in MPIRUN[mpi]]
    command = [*launcher, "-np", "4", PYTHON, *PREFLIGHT, "--pairs", "all"]
    (printed,) = hosts.run_on_both(tmp_path, {"rz1": command})
    check_passes(tmp_path, printed, ["rz1", "rz1", "rz2", "rz2"])


def test_the_preflight_passes_under_torchrun_on_two_hosts(tmp_path, hosts):
    commands = {
        host: [TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=rz1", *PREFLIGHT]
        for node, host in enumerate(HOSTS)
    }
    check_passes(tmp_path, hosts.run_on_both(tmp_path, commands)[0], list(HOSTS))


def test_a_rank_that_never_starts_is_named(tmp_path, hosts):
    command = [PYTHON, *PREFLIGHT, *by_hand(0, "--start_timeout", "3")]
    (printed,) = hosts.run_on_both(tmp_path, {"rz1": command}, code=1)
    assert "missing rank 1; no process from node 1" in printed
    found, fit = statuses(tmp_path)
    assert not fit and found["rendezvous"] == "fail" and found["links"] == "skipped"


def test_another_version_of_torch_on_one_host_is_refused(tmp_path, hosts):
    printed = "".join(start(hosts, tmp_path, **fault("torch"), code=1))
    assert "on rank 0 (rz1); 2.14.0 on rank 1 (rz2)" in printed
    assert "install the same version of torch on all hosts" in printed


def test_another_clock_a_slow_rank_and_another_virtual_environment_are_reported(tmp_path, hosts):
    other = tmp_path / "other"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", other], check=True)
    (site_packages,) = other.glob("lib/*/site-packages")
    # addsitedir, since the packages here may be there by a .pth file themselves.
    (site_packages / "same.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    # As the interpreter of the virtual environment, the words before the command replace PYTHON.
    replace = ("env", "FAULT=clock,slow", "sh", "-c", 'shift; exec "$0" "$@"', str(other / "bin/python"))
    model = ("--model", "ResNet", "--data", "Digits")
    printed = "".join(start(hosts, tmp_path, *model, **fault("clock,slow") | {"second": replace}))
    check_passes(tmp_path, printed, list(HOSTS))
    assert "the clock of rz2 is 90." in printed or "the clock of rz2 is 89.9" in printed
    assert "ahead of the clock of rz1" in printed
    assert f"{other} on rank 1 (rz2)" in printed and "warn     environment" in printed
    (line,) = [line for line in printed.splitlines() if "times the median" in line]
    assert line.strip().startswith("rank 1 on rz2 takes ")
    assert statuses(tmp_path)[0]["training steps"] == "warn"


def test_other_code_of_rankzero_on_one_host_is_refused(tmp_path, hosts):
    copy = tmp_path / "copy"
    for name in ("launch", "project", "lightning_modules", "data_modules"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "project/rankzero/messages.py").open("a") as file:
        file.write("# changed\n")
    printed, _ = start(hosts, tmp_path, command=(PREFLIGHT, (f"{copy}/launch/preflight.py", *CHECKED)), code=1)
    # In two whole test runs, another property differed too; its name was not recorded.
    assert re.search("Rankzero's code differs? between ranks", printed) and "rankzero/messages.py: " in printed


def test_other_code_of_the_user_on_one_host_is_refused(tmp_path, hosts):
    for host, value in zip(HOSTS, (1, 2), strict=True):
        (tmp_path / host).mkdir()
        text = f"from lightning_modules import MLP\n\nVALUE = {value}\n\n\nclass MyModel(MLP):\n    pass\n"
        (tmp_path / host / "my_model.py").write_text(text)
    command = (script("fit"), "--model", "my_model.MyModel", "--data", "Toy")
    paths = [("env", f"PYTHONPATH={tmp_path / host}") for host in HOSTS]
    printed = start(hosts, tmp_path, command=command, first=paths[0], second=paths[1], code=2)
    assert printed[0].count("my_model: ") == 1 and "use the same files on all hosts" in printed[0]
    assert printed[1].count("your code differs between ranks") == 1


def test_different_flags_on_one_host_are_refused(tmp_path, hosts):
    commands = tuple((script("fit"), *CHECKED[:4], "--epochs", epochs) for epochs in "12")
    printed = start(hosts, tmp_path, command=commands, code=2)
    assert printed[0].count("trainer.max_epochs: 1 on rank 0 (rz1); 2 on rank 1 (rz2)") == 1
    assert printed[1].count("settings differ between ranks") == 1


def test_a_link_of_100_mbit_per_second_is_named(tmp_path, hosts):
    limit = ("root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
    on("rz1", "tc", "qdisc", "add", "dev", "to-rz2", *limit)
    try:
        printed = "".join(start(hosts, tmp_path, code=1))
    finally:
        on("rz1", "tc", "qdisc", "del", "dev", "to-rz2", "root")
    found, _ = statuses(tmp_path)
    # The training steps of the preflight do not communicate, so they do not fail.
    assert {name for name, status in found.items() if status == "fail"} == {"collectives", "links"}, printed
    assert "rz1 - rz2 (ranks 0 and 1): 0.1" in printed


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        ('mount --bind -o ro "$0" "$0"', "rank 1 (rz2): OSError: [Errno 30] Read-only file system"),
        ('mount -t tmpfs tmpfs "$0"', "runs on rank 1 (rz2) is not the same folder as on rank 0"),
    ],
    ids=["cannot be written", "is not shared"],
)
def test_a_run_directory_that_one_host_does_not_share_is_named(tmp_path, hosts, mount, message):
    (tmp_path / "runs").mkdir()
    mounted = ("unshare", "--mount", "sh", "-c", f'{mount}; exec "$@"', str(tmp_path / "runs"))
    assert message in start(hosts, tmp_path, second=mounted, code=1)[0]


def test_a_full_disk_is_named(tmp_path, hosts):
    with disk_at(tmp_path / "disk", "4m") as disk:
        (disk / "ballast").write_bytes(bytes(4 * 2**20))
        printed = start(hosts, tmp_path, "--root", str(disk), code=1)
    assert "No space left on device" in "".join(printed) and statuses(tmp_path)[0]["run directory"] == "fail"


def test_nccls_syntax_for_gloos_interface_is_refused_before_gloo_ends_the_process(tmp_path):
    environment = {"GLOO_SOCKET_IFNAME": "^lo"}
    result = run("python", script("fit"), "--devices", "2", folder=tmp_path, environment=environment, code=2)
    assert "GLOO_SOCKET_IFNAME=^lo has NCCL's syntax" in result.err and "unset GLOO_SOCKET_IFNAME" in result.err
    result = run("python", *PREFLIGHT, "--devices", "2", folder=tmp_path, environment=environment, code=1)
    assert statuses(tmp_path)[0]["gloo messages"] == "skipped"


def test_a_full_preflight_before_training_does_not_change_the_result(tmp_path):
    for mode in ("off", "full"):
        flags = (*CHECKED[:4], "--devices", "2", "--epochs", "1", "--preflight", mode, "--name", mode)
        run("python", script("fit"), *flags, folder=tmp_path)
    metrics = [json.loads((tmp_path / f"runs/{mode}/summary.json").read_text())["metrics"] for mode in ("off", "full")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("name", ["preflight", "fit"])
def test_sigterm_during_the_training_steps_is_no_success(tmp_path, name):
    (tmp_path / "mine.py").write_text(
        "import os, signal\nfrom lightning_modules import MLP\n\n\nclass Net(MLP):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        if batch_idx == 3:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return super().training_step(batch, batch_idx)\n"
    )
    flags = ("--model", "mine.Net", "--data", "Toy", *(("--preflight", "full") if name == "fit" else ()))
    result = run("python", script(name), *flags, folder=tmp_path, code=None)
    assert result.code == (75 if name == "fit" else -15), result
