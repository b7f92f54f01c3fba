"""A run that cannot start prints the reason once, does not wait, and exits with 2 on all ranks of real launchers."""

import re
from pathlib import Path

import pytest

from running import BIN, require, run, script
from system.hosts import HOSTS
from system.slurm import submit
from system.test_launchers import MPIRUN

PYTHON, FIT = str(BIN / "python"), script("fit")
TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "1", FIT)
TWO_BY_TWO = ("--nodes", "2", "--devices", "2")
RANK_0_MOVED = "rank 0 is on rz1, but rz2 (10.93.0.2)"


def check(printed: str, folder: Path, *texts: str) -> None:
    """Checks that the refusal was printed once, with all parts, and that no run was created.

    The commands have a limit, which is below the 300 s of --start_timeout, so a command that waits fails the test.
    """
    messages = re.findall(r"rankzero: cannot start\n  asked  .*\n(?:.*\n)*?  type   .*", printed)
    assert len(messages) == 1 == printed.count("cannot start"), printed
    for text in texts:
        assert text in printed, printed
    assert not (folder / "runs").exists()


def by_hand(*flags: str, port: int = 29520) -> dict[str, list[str]]:
    """Returns the command that a user types on each host for two processes per host."""
    rendezvous = (*TWO_BY_TWO, "--master_addr", "rz1", "--master_port", str(port))
    return {host: [PYTHON, FIT, *rendezvous, "--node_rank", str(node), *flags] for node, host in enumerate(HOSTS)}


class TestOnTwoHosts:
    @pytest.fixture
    def refused(self, tmp_path, hosts):
        """Returns a function that runs a command on each host, and returns what each host prints."""

        def run_on_hosts(commands, **environment):
            return hosts.run_on_both(tmp_path, commands, environment, code=2)

        return run_on_hosts

    def test_an_address_that_is_not_rank_zeros_is_refused(self, tmp_path, refused):
        first, second = refused(by_hand("--master_addr", "rz2"))
        check(first, tmp_path, RANK_0_MOVED, "--node_rank 0 on rz2")
        assert second.count("rankzero: rank 2 on rz2 did not start") == 1

    def test_a_missing_machine_is_reported_after_the_start_timeout(self, tmp_path, refused):
        """Starts one of the two hosts of each of two runs."""
        timeout = ("--start_timeout", "2")
        one_host_each = {"rz1": by_hand(*timeout)["rz1"], "rz2": by_hand(*timeout, port=29521)["rz2"]}
        missing = ("ranks 2, 3; no process from node 1", "rank 0, which")
        for printed, ranks in zip(refused(one_host_each), missing, strict=True):
            check(printed, tmp_path, f"missing {ranks}", "within 2 s")

    def test_two_processes_with_the_same_rank_are_refused(self, tmp_path, refused):
        twice = ["sh", "-c", f"{PYTHON} {FIT} & RANK=0 {PYTHON} {FIT}; code=$?; wait; exit $code"]
        variables = {"WORLD_SIZE": "3", "RANK": "1", "MASTER_ADDR": "rz1", "MASTER_PORT": "29520"}
        for printed in refused({"rz1": twice, "rz2": [PYTHON, FIT]}, **variables):
            check(printed, tmp_path, "one process with rank 1", "on rz1", "on rz2")

    def test_a_folder_of_runs_that_is_not_shared_is_refused_in_both_terminals(self, tmp_path, refused):
        (tmp_path / "runs").mkdir()
        (tmp_path / "own.sh").write_text('mount -t tmpfs tmpfs "$1"; shift; exec "$@"\n')
        commands = by_hand()
        commands["rz2"][:0] = ["unshare", "--mount", "sh", str(tmp_path / "own.sh"), str(tmp_path / "runs")]
        for printed in refused(commands):
            assert "rankzero: cannot start\n  rank 2 on rz2:\n  asked  --root runs\n" in printed, printed
            assert f"the host of this rank does not share {tmp_path}/runs, in which rank zero" in printed
            assert "all hosts share" in printed

    def test_a_nonexistent_interface_is_refused(self, tmp_path, refused):
        first, _ = refused(by_hand("--devices", "1", "--interface", "ib7"))
        check(first, tmp_path, "rz1 has no network interface of that name", "to-rz2", "--interface to-rz2")

    @pytest.mark.parametrize(
        ("mpi", "order", "command", "texts"),
        [
            ("openmpi", (1, 2), (PYTHON, FIT, "--devices", "2"), ("mpi started", "--devices 2")),
            ("mpich", (1, 2), (PYTHON, FIT, *TWO_BY_TWO), ("mpi started", "--nodes 2 --devices 2")),
            ("openmpi", (1, 2), TORCHRUN, ("torchrun within mpi", "each would start a separate run")),
            ("openmpi", (2, 1), ("-x", "MASTER_ADDR=rz2", PYTHON, FIT), (f"{RANK_0_MOVED} is", "-x MASTER_ADDR=rz1")),
        ],
        ids=["too few", "too few, hydra", "a torchrun in each task", "the address of another host"],
    )
    def test_an_mpirun_that_does_not_fit_is_refused(self, tmp_path, hosts, mpi, order, command, texts):
        require(mpi)
        slots, code = ",".join(f"rz{number}:1" for number in order), 1 if command is TORCHRUN else 2
        launcher = [argument.format(agent=hosts.agent, slots=slots) for argument in MPIRUN[mpi]]
        (printed,) = hosts.run_on_both(tmp_path, {"rz1": [*launcher, "-np", "2", *command]}, code=code)
        check(printed, tmp_path, *texts)


UNKNOWN_ADDRESS = ("'no-such-host' does not resolve on ", "--master_addr HOST")
TOO_FEW_TASKS = ("started 2 nodes x 1 process", "--nodes 2 --devices 1", "--ntasks-per-node=4")
RANK_0_ALONE = f"if [ $SLURM_PROCID = 1 ]; then sleep 4; else exec {PYTHON} {FIT} --start_timeout 2; fi"


@pytest.mark.xdist_group("slurm")
class TestUnderSlurm:
    @pytest.mark.parametrize(
        ("command", "texts"),
        [
            (("--ntasks-per-node=1", PYTHON, FIT, "--devices", "4"), TOO_FEW_TASKS),
            (("--ntasks=3", PYTHON, FIT, *TWO_BY_TWO), ["2 nodes with 2 and 1 processes"]),
            (("--ntasks-per-node=2", "env", "MASTER_ADDR=no-such-host", PYTHON, FIT), UNKNOWN_ADDRESS),
            (("--ntasks-per-node=1", "sh", "-c", RANK_0_ALONE), ["missing rank 1; no process from n2"]),
        ],
        ids=["too few tasks", "uneven tasks", "an unknown address", "a missing rank"],
    )
    def test_an_srun_that_does_not_fit_is_refused(self, slurm, tmp_path, command, texts):
        result = run("srun", "--nodes=2", *command, folder=tmp_path, environment=slurm, code=2)
        check(result.out + result.err, tmp_path, *texts)

    def test_a_batch_script_without_srun_or_with_a_torchrun_in_each_task_is_refused(self, slurm, tmp_path):
        script_file = tmp_path / "job.sh"
        script_file.write_text(
            f"#!/bin/sh\n{PYTHON} {FIT}; echo exited with code $?; echo ---\n"
            f"srun --ntasks-per-node=1 {BIN}/torchrun --standalone --nproc-per-node 2 {FIT} 2>&1\n"
        )
        _, printed = submit(script_file, slurm, "--nodes=2", "--ntasks=4")
        without_srun, torchrun_per_node = printed.split("---\n", 1)
        assert "exited with code 2" in without_srun
        check(without_srun, tmp_path, "no task has been started", "srun --nodes=2 --ntasks-per-node=2")
        check(torchrun_per_node, tmp_path, "each would start a separate run", "srun --ntasks-per-node=1 torchrun")


def test_ranks_without_an_address_print_one_message_per_shell_and_exit_with_2(tmp_path):
    ranks = f"RANK=0 {PYTHON} {FIT} & first=$!; RANK=1 {PYTHON} {FIT}; echo exited with $?; wait $first"
    shells = " & ".join(f"sh -c '{ranks}; echo exited with $?' > {shell}.txt 2>&1" for shell in range(2))
    run("sh", "-c", f"{shells} & wait", folder=tmp_path)
    for shell in range(2):
        printed = (tmp_path / f"{shell}.txt").read_text()
        check(printed, tmp_path, "WORLD_SIZE is not set")
        assert printed.count("exited with 2\n") == 2
