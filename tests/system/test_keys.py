"""The ranks of a run share a key, or a line says that they do not, under each launcher."""

import re
from pathlib import Path

import pytest

from running import require, run, write_program
from system.hosts import HOSTS
from system.learned import PYTHON, TRAIN
from system.test_launchers import MPIRUN

SHORT = (*TRAIN, "--epochs", "1")
NOTICE = re.compile(
    r"rankzero: the control channel is not authenticated: rank 0 on \S+ has another key \(.*\) than rank 1"
)
KEY = "0123456789abcdef" * 2


def by_hand(node: int) -> list[str]:
    rendezvous = ["--nodes", "2", "--devices", "1", "--master_addr", "rz1", "--master_port", "29551"]
    return [PYTHON, *SHORT, *rendezvous, "--node_rank", str(node)]


def with_home(folder: Path, name: str, *command: str) -> list[str]:
    """Returns a command that runs with another home directory than those with another name."""
    return ["env", "-u", "XDG_CONFIG_HOME", f"HOME={folder / 'homes' / name}", *command]


@pytest.mark.parametrize(
    ("variables", "flags", "notices"),
    [({}, (), 1), ({"RANKZERO_KEY": KEY}, ("--auth", "required"), 0), ({}, ("--auth", "required"), None)],
    ids=["different homes", "RANKZERO_KEY", "a key is required"],
)
def test_hosts_with_different_homes_have_a_common_key_print_a_notice_or_are_refused(
    tmp_path, hosts, variables, flags, notices
):
    timeout = ("--start_timeout", "5") if notices is None else ()
    commands = {host: with_home(tmp_path, host, *by_hand(node), *flags, *timeout) for node, host in enumerate(HOSTS)}
    code = 2 if notices is None else 0
    printed = "".join(hosts.run_on_both(tmp_path, commands, environment=variables, code=code))
    assert KEY not in printed
    assert not any(KEY in file.read_text(errors="replace") for file in tmp_path.rglob("*.*") if file.is_file())
    if notices is not None:
        assert len(NOTICE.findall(printed)) == notices
        return
    assert "cannot start" in printed and "RANKZERO_KEY" in printed
    assert "Traceback" not in printed


def script_with_home(folder: Path, node: str) -> str:
    """Writes a script that trains with a home directory for each value of an expression of the shell."""
    home = f"HOME={folder}/homes/{node} exec env -u XDG_CONFIG_HOME"
    return str(write_program(folder / "fit.sh", f'{home} {PYTHON} {" ".join(SHORT)} "$@"'))


@pytest.mark.parametrize("mpi", MPIRUN)
def test_hosts_with_different_homes_under_mpirun(tmp_path, hosts, mpi):
    require(mpi)
    script = script_with_home(tmp_path, "$(hostname)")
    launcher = [argument.format(agent=hosts.agent, slots="rz1:1,rz2:1") for argument in MPIRUN[mpi]]
    command = [*launcher, "-np", "2"]
    (printed,) = hosts.run_on_both(tmp_path, {"rz1": [*command, script, "--run", "a"]})
    assert len(NOTICE.findall(printed)) == 1, printed
    (tmp_path / "rz1.log").unlink()
    passes_key = ["-x", "RANKZERO_KEY"] if mpi == "openmpi" else []
    command = [*command, *passes_key, script, "--run", "b", "--auth", "required"]
    (printed,) = hosts.run_on_both(tmp_path, {"rz1": command}, environment={"RANKZERO_KEY": KEY})
    assert not NOTICE.findall(printed), printed


@pytest.mark.xdist_group("slurm")
def test_nodes_with_different_homes_under_slurm(slurm, tmp_path):
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", script_with_home(tmp_path, "$SLURM_NODEID"))
    environment = {**slurm}
    result = run(*command, "--run", "a", folder=tmp_path, environment=environment)
    assert len(NOTICE.findall(result.err)) == 1, result
    environment["RANKZERO_KEY"] = KEY
    result = run(*command, "--run", "b", "--auth", "required", folder=tmp_path, environment=environment)
    assert not NOTICE.findall(result.err), result
