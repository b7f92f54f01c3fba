import os

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.explain import explain
from rankzero.distributed.environments.validate import PROCESSES_PER_CORE
from rankzero.messages import Exit
from recorded import OPEN_MPI, STEP, TORCHRUN
from running import command_of


@pytest.fixture
def explain_rows(monkeypatch, capsys):
    """Returns a function that explains a command line and returns the printed rows by label."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, **variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert explain(parse_arguments(command_of("fit"), arguments)) == Exit.FINISHED
        rows = {}
        for line in capsys.readouterr().out.splitlines():
            label, _, text = line.partition(":")
            rows.setdefault(label.strip(), []).append(text.strip())
        return rows

    return run


def test_explain_describes_local_processes_that_share_the_cores(explain_rows):
    rows = explain_rows()
    assert rows["launcher"] == ["local (no launcher's variables are set)"] and rows["world"] == ["1 node x 1 process"]
    assert rows["backend"] == ["nccl if each process has its own GPU, else gloo"]
    assert not {"this is", "rendezvous", "hosts", "read"} & rows.keys()
    one = "one process, or one per GPU of this machine"
    for devices, work, each in ((None, one, ""), (1, one, ""), (3, "3 processes on this machine", "each ")):
        rows = explain_rows(*(["--devices", str(devices)] if devices else []))
        assert rows["would start"] == [work]
        threads = f"{max(1, len(os.sched_getaffinity(0)) // (devices or 1))} {each}("
        assert rows["threads"][0].startswith(threads) or "quota" in rows["threads"][0]


RANK_ZERO_OF_SLURM = {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
RANK_ZERO_OF_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
LAUNCHERS = {
    "torchrun": (
        *(TORCHRUN, {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}),
        {"world": ["2 nodes x 2 processes"], "this is": ["rank 0, node 0"], "rendezvous": ["a:29500"]},
    ),
    "Open MPI": (OPEN_MPI, RANK_ZERO_OF_MPI, {"world": ["1 node x 2 processes"]}),
    "Slurm": (STEP, RANK_ZERO_OF_SLURM, {"world": ["2 nodes x 2 processes"], "hosts": ["n1, n2"]}),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_zero_explains_the_variables_of_the_launcher_and_other_ranks_print_nothing(explain_rows, launcher):
    variables, rank_zero, expected = LAUNCHERS[launcher]
    assert explain_rows(**variables) == {}
    variables = variables | rank_zero
    rows = explain_rows(**variables)
    assert rows.items() >= expected.items()
    assert rows["would start"] == ["the work of this rank, after the rendezvous of all ranks"]
    read = dict(row.split("=", 1) for row in rows["read"])
    assert read and read.items() <= variables.items() and list(read) == sorted(read)


def test_nodes_threads_and_backend_given_by_the_user_are_shown(explain_rows):
    address = ("--nodes=2", "--node_rank=0", "--master_addr=node1", "--master_port=29511")
    expected = {"rendezvous": ["node1:29511"], "this is": ["rank 0, node 0"]}
    for devices, world, work in (
        (1, "2 nodes x 1 process", "the work of this rank, after the rendezvous of all ranks"),
        (2, "2 nodes x 2 processes", "2 processes on this machine"),
    ):
        rows = explain_rows(*address, f"--devices={devices}")
        assert rows.items() >= (expected | {"world": [world], "would start": [work]}).items()
    rows = explain_rows("--backend", "gloo", OMP_NUM_THREADS="5")
    assert rows["threads"] == ["as set by OMP_NUM_THREADS=5"] and rows["backend"] == ["gloo"]


@pytest.mark.parametrize(
    ("arguments", "variables", "found", "detected"),
    [
        ("--nodes 2", {}, "one process on one machine; no launcher's variables are set", False),
        ("--launcher mpi", {}, "none of its variables is set, so this process was not started by mpi", False),
        ("", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, "no task has been started (SLURM_JOB_ID=1", False),
        (f"--devices {PROCESSES_PER_CORE * (os.cpu_count() or 1) + 1}", {}, "cores on this machine", True),
        ("--devices 3", {**STEP, **RANK_ZERO_OF_SLURM}, "slurm started 2 nodes x 2 processes", True),
    ],
)
def test_a_refusal_is_shown_below_the_launcher_if_one_was_detected(explain_rows, arguments, variables, found, detected):
    rows = explain_rows(*arguments.split(), **variables)
    assert rows["would start"] == ["nothing"] and found in " ".join(rows)
    assert ("launcher" in rows) == detected and (list(rows)[:2] == ["launcher", "world"]) == detected
    assert not detected or any(label.startswith("found") and found in label for label in rows)
