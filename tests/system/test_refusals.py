"""A run that cannot start prints the reason once, does not wait, and exits with 2 on all ranks of real launchers."""

import re
from pathlib import Path

import pytest

from running import BIN, require, run, script
from system.hosts import HOSTS
from system.slurm import submit
from system.test_launchers import MPIRUN

PYTHON, FIT = str(BIN / "python"), script("fit")


def check(printed: str, folder: Path, *texts: str, times: int = 1) -> None:
    """Checks that the refusal was printed `times` times, with all parts, and that no run was created.

    The commands have a limit of 120 s, below the 300 s of --start_timeout, so a command that waits fails the test.
    """
    messages = re.findall(r"rankzero: cannot start\n  asked  .*\n(?:.*\n)*?  type   .*", printed)
    assert len(messages) == times == printed.count("cannot start"), printed
    for text in texts:
        assert text in printed, printed
    assert not (folder / "runs").exists()


ENV = {"WORLD_SIZE": "2", "MASTER_PORT": "29520", "MASTER_ADDR": "rz1"}


class TestOnTwoHosts:
    @pytest.mark.parametrize(
        ("address", "texts"),
        [
            ("no-such-host", ("'no-such-host' does not resolve on rz1", "--master_addr HOST")),
            ("10.93.0.77", ("rank 0 is on rz1, but 10.93.0.77", "--master_addr rz1")),
            ("rz2", ("rank 0 is on rz1, but rz2 (10.93.0.2)", "--node_rank 0 on rz2")),
        ],
    )
    def test_an_address_that_is_not_rank_zeros_is_refused(self, tmp_path, hosts, address, texts):
        rendezvous = ("--nodes", "2", "--devices", "2", "--master_addr", address, "--master_port", "29520")
        commands = {host: [PYTHON, FIT, *rendezvous, "--node_rank", str(node)] for node, host in enumerate(HOSTS)}
        results = hosts.run_on_both(tmp_path, commands)
        assert [code for code, _ in results.values()] == [2, 2], results
        check(results["rz1"][1], tmp_path, *texts)
        assert results["rz2"][1].count("rankzero: rank 2 on rz2 did not start") == 1

    def test_a_missing_machine_is_reported_after_the_start_timeout(self, tmp_path, hosts):
        rendezvous = ("--nodes", "2", "--devices", "2", "--master_addr", "rz1", "--master_port", "29521")
        for node, (host, missing) in enumerate(
            [("rz1", "ranks 2, 3; no process from node 1"), ("rz2", "rank 0, which")]
        ):
            command = [PYTHON, FIT, *rendezvous, "--node_rank", str(node), "--start_timeout", "2"]
            results = hosts.run_on_both(tmp_path, {host: command})
            assert results[host][0] == 2
            check(results[host][1], tmp_path, f"missing {missing}", "within 2 s")

    def test_two_processes_with_the_same_rank_are_refused(self, tmp_path, hosts):
        commands = {host: ["env", f"RANK={rank}", PYTHON, FIT] for rank, host in enumerate(HOSTS)}
        twice = ["sh", "-c", f"{PYTHON} {FIT} & RANK=0 {PYTHON} {FIT}; code=$?; wait; exit $code"]
        results = hosts.run_on_both(
            tmp_path, commands | {"rz1": twice}, environment=ENV | {"RANK": "1", "WORLD_SIZE": "3"}
        )
        assert [code for code, _ in results.values()] == [2, 2], results
        check(results["rz1"][1], tmp_path, "one process with rank 1", "on rz1", "on rz2")
        check(results["rz2"][1], tmp_path, "one process with rank 1", "on rz1", "on rz2")

    def test_a_folder_of_runs_that_is_not_shared_is_refused_in_both_terminals(self, tmp_path, hosts):
        (tmp_path / "runs").mkdir()
        (tmp_path / "own.sh").write_text('mount -t tmpfs tmpfs "$1"; shift; exec "$@"\n')
        own_folder = ["unshare", "--mount", "sh", str(tmp_path / "own.sh"), str(tmp_path / "runs")]
        rendezvous = ("--nodes", "2", "--devices", "2", "--master_addr", "rz1", "--master_port", "29522")
        commands = {
            host: [*(own_folder if node else []), PYTHON, FIT, *rendezvous, "--node_rank", str(node)]
            for node, host in enumerate(HOSTS)
        }
        results = hosts.run_on_both(tmp_path, commands)
        assert [code for code, _ in results.values()] == [2, 2], results
        for _, printed in results.values():
            assert "rankzero: cannot start\n  rank 2 on rz2:\n  asked  --root runs\n" in printed, printed
            assert (
                f"the host of this rank does not share {tmp_path}/runs, in which rank zero" in printed
                and "all hosts share" in printed
            )

    def test_ranks_with_different_world_sizes_are_refused(self, tmp_path, hosts):
        commands = {
            host: ["env", f"RANK={rank}", f"WORLD_SIZE={2 + rank}", PYTHON, FIT] for rank, host in enumerate(HOSTS)
        }
        results = hosts.run_on_both(tmp_path, commands, environment=ENV)
        assert [code for code, _ in results.values()] == [2, 2], results
        check(results["rz1"][1], tmp_path, "rank 1 on rz2 expects 3")
        check(results["rz2"][1], tmp_path, "rank 1 on rz2 expects 3")

    def test_a_nonexistent_interface_is_refused(self, tmp_path, hosts):
        commands = {host: ["env", f"RANK={rank}", PYTHON, FIT, "--interface", "ib7"] for rank, host in enumerate(HOSTS)}
        results = hosts.run_on_both(tmp_path, commands, environment=ENV)
        assert [code for code, _ in results.values()] == [2, 2], results
        check(results["rz1"][1], tmp_path, "rz1 has no network interface of that name", "to-rz2", "--interface to-rz2")

    @pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
    def test_mpirun_with_fewer_processes_than_requested_is_refused(self, tmp_path, hosts, mpi):
        require(mpi)
        slots = ",".join(f"{host}:2" for host in HOSTS)
        mpirun = [argument.format(agent=hosts.agent, slots=slots) for argument in MPIRUN[mpi]]
        for flags in (("--nodes", "2", "--devices", "4"), ("--devices", "4")):
            code, printed = hosts.run_on_both(tmp_path, {"rz1": [*mpirun, "-np", "4", PYTHON, FIT, *flags]})["rz1"]
            (tmp_path / "rz1.log").unlink()
            assert code == 2, printed
            check(printed, tmp_path, "mpi started", " ".join(flags))

    def test_a_separate_torchrun_in_each_mpirun_task_is_refused(self, tmp_path, hosts):
        require("openmpi")
        mpirun = [argument.format(agent=hosts.agent, slots="rz1:1,rz2:1") for argument in MPIRUN["openmpi"]]
        command = [*mpirun, "-np", "2", str(BIN / "torchrun"), "--nproc-per-node", "1", FIT]
        printed = hosts.run_on_both(tmp_path, {"rz1": command})["rz1"][1]
        check(printed, tmp_path, "torchrun within mpi", "each would start a separate run")

    def test_mpirun_with_the_address_of_another_host_is_refused(self, tmp_path, hosts):
        require("openmpi")
        mpirun = [argument.format(agent=hosts.agent, slots="rz2:1,rz1:1") for argument in MPIRUN["openmpi"]]
        command = [*mpirun, "-np", "2", "-x", "MASTER_ADDR=rz2", PYTHON, FIT]
        code, printed = hosts.run_on_both(tmp_path, {"rz1": command})["rz1"]
        assert code == 2, printed
        check(printed, tmp_path, "rank 0 is on rz1, but rz2 (10.93.0.2) is another machine", "-x MASTER_ADDR=rz1")


@pytest.mark.xdist_group("slurm")
class TestUnderSlurm:
    def srun(self, slurm, folder, *command, **variables):
        result = run("srun", *command, folder=folder, environment=slurm | variables, code=2)
        return result.out + result.err

    @pytest.mark.parametrize(
        ("tasks", "requested", "texts"),
        [
            (("--ntasks-per-node=1",), ("--nodes", "1"), ("started 2 nodes x 1 process", "--nodes 2 --devices 1")),
            (("--ntasks-per-node=1",), ("--devices", "4"), ("started 2 nodes x 1", "--ntasks-per-node=4")),
            (("--ntasks-per-node=2",), ("--nodes", "2", "--devices", "1"), ("started 2 nodes x 2 processes",)),
            (("--ntasks=3",), ("--nodes", "2", "--devices", "2"), ("2 nodes with 2 and 1 processes",)),
        ],
    )
    def test_a_wrong_number_of_tasks_is_refused(self, slurm, tmp_path, tasks, requested, texts):
        printed = self.srun(slurm, tmp_path, "--nodes=2", *tasks, PYTHON, FIT, *requested)
        check(printed, tmp_path, *texts)

    def test_a_missing_rank_is_reported_after_the_start_timeout(self, slurm, tmp_path):
        shell = f"if [ $SLURM_PROCID = 1 ]; then sleep 4; else {PYTHON} {FIT} --start_timeout 2; fi"
        printed = self.srun(slurm, tmp_path, "--nodes=2", "--ntasks-per-node=1", "sh", "-c", shell)
        check(printed, tmp_path, "missing rank 1; no process from n2")

    def test_an_address_that_does_not_resolve_is_refused(self, slurm, tmp_path):
        task = ("--nodes=2", "--ntasks-per-node=2", PYTHON, FIT)
        printed = self.srun(slurm, tmp_path, *task, MASTER_ADDR="no-such-host")
        check(printed, tmp_path, "'no-such-host' does not resolve")

    def test_a_batch_script_without_srun_or_with_several_torchruns_is_refused(self, slurm, tmp_path):
        torchrun = f"{BIN}/torchrun --standalone --nproc-per-node 2 {FIT} 2>&1 | grep -A5 rankzero:"
        script_file = tmp_path / "job.sh"
        script_file.write_text(
            f"#!/bin/sh\n{PYTHON} {FIT}; echo exited with code $?; echo ---\n"
            f"{PYTHON} {FIT} --nodes 2 --devices 2; echo exited with code $?; echo ---\n"
            f"srun --ntasks=4 sh -c '{torchrun}'; echo ---\n"
            f"srun --ntasks=2 --ntasks-per-node=1 sh -c '{torchrun}'\n"
        )
        _, printed = submit(script_file, slurm, "--nodes=2", "--ntasks=4")
        without_srun, with_flags, several_torchruns, torchrun_per_node = printed.split("---\n")
        for output in (without_srun, with_flags):
            assert "exited with code 2" in output
            check(output, tmp_path, "no task has been started", "srun --nodes=2 --ntasks-per-node=2")
        for output in (several_torchruns, torchrun_per_node):
            check(output, tmp_path, "each would start a separate run", "srun --ntasks-per-node=1 torchrun")


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_PORT is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "rank 4 is not below 4"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}, "no task has been started"),
    ],
)
def test_incomplete_or_invalid_launcher_variables_are_refused(tmp_path, variables, found):
    result = run(PYTHON, FIT, folder=tmp_path, environment=variables, code=2)
    check(result.err, tmp_path, found)


def test_ranks_without_an_address_print_one_message_per_shell(tmp_path):
    ranks = " & ".join(f"RANK={rank} {PYTHON} {FIT} 2>&1" for rank in range(2))
    shells = " & ".join(f"sh -c '{ranks} & wait' > {shell}.txt" for shell in range(2))
    run("sh", "-c", f"{shells} & wait", folder=tmp_path)
    for shell in range(2):
        check((tmp_path / f"{shell}.txt").read_text(), tmp_path, "WORLD_SIZE is not set")


def test_explain_prints_the_launcher_and_starts_nothing(tmp_path):
    variables = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    result = run(PYTHON, FIT, "--explain", folder=tmp_path, environment=variables)
    assert "MASTER_ADDR=nowhere" in result.out and "env (RANK=0" in result.out
    refused = run(PYTHON, FIT, "--explain", folder=tmp_path, environment={"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"})
    assert "would start: nothing" in refused.out and "srun" in refused.out
    assert not list(tmp_path.iterdir())
