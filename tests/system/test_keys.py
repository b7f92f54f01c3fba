"""The ranks of a run share a key, or a line says that they do not, under each launcher."""

import re
from pathlib import Path

import pytest

from running import BIN, require, run
from system.hosts import HOSTS
from system.learned import PYTHON, TORCHRUN, TRAIN
from system.test_launchers import MPIRUN

SHORT = (*TRAIN, "--epochs", "1")
NOTICE = re.compile(
    r"rankzero: the control channel is not authenticated: rank 0 on \S+ has another key \(.*\) than rank 1"
)
KEY = "0123456789abcdef" * 2


def by_hand(node: int) -> list[str]:
    rendezvous = ["--nodes", "2", "--devices", "1", "--master_addr", "rz1", "--master_port", "29551"]
    return [PYTHON, *SHORT, *rendezvous, "--node_rank", str(node)]


def by_torchrun(node: int) -> list[str]:
    rendezvous = ["--node-rank", str(node), "--master-addr", "rz1", "--master-port", "29552"]
    return [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, *SHORT]


def with_home(folder: Path, name: str, *command: str) -> list[str]:
    """Returns a command that runs with another home directory than those with another name."""
    return ["env", "-u", "XDG_CONFIG_HOME", f"HOME={folder / 'homes' / name}", *command]


LAUNCHES = pytest.mark.parametrize("launch", [by_hand, by_torchrun], ids=["by hand", "torchrun"])


@LAUNCHES
@pytest.mark.parametrize(
    ("variables", "flags", "is_authenticated"),
    [
        ({}, (), False),
        ({"RANKZERO_KEY": KEY}, ("--auth", "required"), True),
    ],
    ids=["different homes", "RANKZERO_KEY"],
)
def test_hosts_with_different_homes(tmp_path, hosts, launch, variables, flags, is_authenticated):
    commands = {host: with_home(tmp_path, host, *launch(node), *flags) for node, host in enumerate(HOSTS)}
    results = hosts.run_on_both(tmp_path, commands, environment=variables)
    printed = "".join(text for _, text in results.values())
    assert [code for code, _ in results.values()] == [0, 0], printed
    assert len(NOTICE.findall(printed)) == (not is_authenticated) and KEY not in printed
    assert not any(KEY in file.read_text(errors="replace") for file in tmp_path.rglob("*.*") if file.is_file())


@LAUNCHES
def test_different_homes_are_refused_if_a_key_is_required(tmp_path, hosts, launch):
    flags = ("--auth", "required", "--start_timeout", "5")
    commands = {host: with_home(tmp_path, host, *launch(node), *flags) for node, host in enumerate(HOSTS)}
    results = hosts.run_on_both(tmp_path, commands)
    printed = "".join(text for _, text in results.values())
    assert {code for code, _ in results.values()} <= {1, 2} and results["rz1"][0] in (1, 2), printed  # torchrun: 1
    assert "cannot start" in printed and "RANKZERO_KEY" in printed
    assert "Traceback" not in printed.partition("rankzero: cannot start")[2].partition("torch/distributed")[0]


@pytest.mark.parametrize("mpi", MPIRUN)
def test_hosts_with_different_homes_under_mpirun(tmp_path, hosts, mpi):
    require(mpi)
    (tmp_path / "fit.sh").write_text(
        f'#!/bin/sh\nHOME={tmp_path}/homes/$(hostname) exec env -u XDG_CONFIG_HOME {PYTHON} {" ".join(SHORT)} "$@"\n'
    )
    launcher = [argument.format(agent=hosts.agent, slots="rz1:1,rz2:1") for argument in MPIRUN[mpi]]
    command = [*launcher, "-np", "2"]
    results = hosts.run_on_both(tmp_path, {"rz1": [*command, "sh", str(tmp_path / "fit.sh"), "--run", "a"]})
    assert results["rz1"][0] == 0 and len(NOTICE.findall(results["rz1"][1])) == 1, results
    (tmp_path / "rz1.log").unlink()
    passes_key = ["-x", "RANKZERO_KEY"] if mpi == "openmpi" else []
    command = [*command, *passes_key, "sh", str(tmp_path / "fit.sh"), "--run", "b", "--auth", "required"]
    results = hosts.run_on_both(tmp_path, {"rz1": command}, environment={"RANKZERO_KEY": KEY})
    assert results["rz1"][0] == 0 and not NOTICE.findall(results["rz1"][1]), results


@pytest.mark.xdist_group("slurm")
def test_nodes_with_different_homes_under_slurm(slurm, tmp_path):
    (tmp_path / "fit.sh").write_text(
        f'#!/bin/sh\nHOME={tmp_path}/homes/$SLURM_NODEID exec env -u XDG_CONFIG_HOME python {" ".join(SHORT)} "$@"\n'
    )
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", "sh", str(tmp_path / "fit.sh"))
    environment = {**slurm, "PATH": f"{BIN}:{slurm['PATH']}"}
    result = run(*command, "--run", "a", folder=tmp_path, environment=environment)
    assert result.code == 0 and len(NOTICE.findall(result.err)) == 1, result
    environment["RANKZERO_KEY"] = KEY
    result = run(*command, "--run", "b", "--auth", "required", folder=tmp_path, environment=environment)
    assert result.code == 0 and not NOTICE.findall(result.err), result
