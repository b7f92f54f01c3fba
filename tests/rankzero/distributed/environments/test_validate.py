from rankzero.cli.arguments import parse_arguments
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.validate import check_world, processes_to_start
from running import command_of, refusal_of

TORCHRUN = Launch(
    launcher="torchrun", evidence="x", world_size=4, num_nodes=2, local_world_size=2, externally_created=True
)
UNEVEN = TORCHRUN._replace(launcher="slurm", world_size=3, processes_per_node=(2, 1))
MPI = TORCHRUN._replace(launcher="mpi", num_nodes=None)


def requested(*arguments):
    return parse_arguments(command_of("fit"), arguments).requested_world


def refusal(launch, *arguments):
    return refusal_of(check_world, requested(*arguments), launch)


def test_requests_that_do_not_contradict_the_launcher_are_accepted():
    elastic = Launch(launcher="torchrun", world_size=2, elastic="--nnodes 1:2", externally_created=True)
    for launch, *lines in (
        *[(TORCHRUN, "", "--nodes 2", "--nodes 2 --devices 2"), (UNEVEN, "", "--nodes 2"), (elastic, "--nodes 2")],
        (MPI, "--nodes 2 --devices 2", "--devices 4"),  # the last one is known to be wrong only after the rendezvous
        (Launch(), "--devices 7"),
    ):
        for line in lines:
            check_world(requested(*line.split()), launch)


def test_requests_that_contradict_the_launcher_are_refused():
    for launch, *lines in (
        (TORCHRUN, "--devices 3", "--devices 4", "--nodes 1", "--trainer.devices 4"),
        *[(UNEVEN, "--devices 2", "--nodes 3"), (MPI, "--nodes 2 --devices 4", "--devices 3", "--nodes 5")],
    ):
        for line in lines:
            assert f"{launch.launcher} started" in refusal(launch, *line.split()).found


def test_a_refusal_proposes_flags_and_a_launcher_command():
    error = refusal(TORCHRUN, "--nodes", "2", "--devices", "4")
    assert "--nodes 2 --devices 2, or omit both" in error.instead
    assert "torchrun --nnodes 2 --nproc-per-node 4 launch/fit.py" in error.instead
    assert "2 nodes with 2 and 1 processes" in refusal(UNEVEN, "--devices", "2").found
    one_task = Launch(launcher="slurm", evidence="x", processes_per_node=(1,), externally_created=True)
    assert "--launcher local" in refusal(one_task, "--devices", "2").instead


def test_local_processes_are_started_only_without_a_launcher():
    assert processes_to_start(requested("--devices", "2"), Launch()) == 2
    assert processes_to_start(requested(), Launch()) == 0
    assert processes_to_start(requested("--devices", "1"), Launch()) == 0
    assert processes_to_start(requested("--devices", "2"), TORCHRUN) == 0
    error = refusal_of(processes_to_start, requested("--devices", "100000"), Launch())
    assert "cores on this machine" in error.found
