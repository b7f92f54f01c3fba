import os
from contextlib import nullcontext

import pytest

from rankzero.cli.arguments import parse_arguments
from rankzero.commands.explain import explain
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.validate import PROCESSES_PER_CORE
from rankzero.messages import Exit, RequestError
from recorded import OPEN_MPI, STEP, TORCHRUN
from running import command_of


@pytest.fixture
def explain_rows(monkeypatch, capsys):
    """Returns a function that explains a command line, expects a refusal or none, and returns the rows by label."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, refusal=None, **variables):
        with monkeypatch.context() as patch, pytest.raises(RequestError, match=refusal) if refusal else nullcontext():
            for name, value in variables.items():
                patch.setenv(name, value)
            flags = parse_arguments(command_of("fit"), arguments)
            assert explain(flags, detect(flags.requested_world)) == Exit.FINISHED
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
        assert (rows["world"], rows["would start"]) == ([f"1 node x {devices or 1} process{'es' * bool(each)}"], [work])
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
    ("arguments", "variables", "found"),
    [
        (f"--devices {PROCESSES_PER_CORE * (os.cpu_count() or 1) + 1}", {}, "cores on this machine"),
        ("--devices 3", {**STEP, **RANK_ZERO_OF_SLURM}, "slurm started 2 nodes x 2 processes"),
        ("--interface none", {}, "no network interface of that name"),
    ],
)
def test_the_refusal_of_a_start_follows_the_explanation(explain_rows, arguments, variables, found):
    rows = explain_rows(*arguments.split(), refusal=found, **variables)
    assert list(rows)[:2] == ["launcher", "world"] and rows["would start"] == ["nothing"]
