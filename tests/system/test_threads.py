"""The number of threads of each rank under real launchers, and the reason in the start line."""

import os
import re
from pathlib import Path

import pytest

from rankzero.distributed.process.limits.cores import usable_cores
from running import INTERPRETER_BIN, require, run
from system.learned import OBSERVE, TRAIN, observed

PYTHON = str(INTERPRETER_BIN / "python")
CORES = len(usable_cores())
ALL_CORES = f"{CORES} core{'s' * (CORES > 1)}"
SHARED = (max(1, CORES // 2), f"{ALL_CORES} / 2 ranks")
ONE_CORE = str(min(os.sched_getaffinity(0)))

TWO_BATCHES = (*OBSERVE, "--trainer.limit_train_batches", "2")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2")


def threads_of(folder, *command, environment=None):
    """Returns the number of threads of each rank, the reason in the start line, and what --explain prints."""
    printed = run(*command, *TWO_BATCHES, folder=folder, environment=environment).out
    counts, reason, _ = observed(folder, printed)
    explanation = run(*command, "--explain", folder=folder, environment=environment).out
    return counts, reason, re.search(r"^threads: +(.*)$", explanation, re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("command", "count", "reason"),
    [
        (("taskset", "-c", ONE_CORE, PYTHON, *TRAIN, "--devices", "2"), 1, "1 core / 2 ranks"),
        ((*MPIRUN, "--bind-to", "none", PYTHON, *TRAIN), *SHARED),
        pytest.param(
            (*MPIRUN, "--bind-to", "core", PYTHON, *TRAIN), 1, "bound to 1 core",
            marks=pytest.mark.skipif(CORES < 2, reason="a single core"),
        ),
    ],
    ids=["taskset", "mpirun", "mpirun that binds"],
)  # fmt: skip
def test_two_ranks_share_the_cores_of_a_machine(cores_shared, command, count, reason):
    if command[0] == MPIRUN[0]:
        require("openmpi")
    assert threads_of(cores_shared, *command) == ([count] * 2, reason, f"{count} each ({reason})")


def test_one_process_uses_all_cores(cores_shared):
    assert threads_of(cores_shared, PYTHON, *TRAIN) == ([CORES], ALL_CORES, f"{CORES} ({ALL_CORES})")


def test_the_users_omp_num_threads_is_kept(cores_shared):
    command, setting = (PYTHON, *TRAIN, "--devices", "2"), f"OMP_NUM_THREADS={CORES}"
    environment = {"OMP_NUM_THREADS": str(CORES)}
    assert threads_of(cores_shared, *command, environment=environment) == ([CORES] * 2, setting, f"as set by {setting}")


@pytest.mark.xdist_group("slurm")
def test_tasks_of_srun_share_the_cores_of_their_machine(cores_shared, slurm):
    command = ("srun", "--nodes=1", "--ntasks=2", PYTHON, *TRAIN)
    environment = {name: value for name, value in slurm.items() if name != "OMP_NUM_THREADS"}
    counts, reason, explained_threads = threads_of(cores_shared, *command, environment=environment)
    assert (counts, reason) == ([SHARED[0]] * 2, SHARED[1])
    assert explained_threads == f"{SHARED[0]} each ({SHARED[1]})"


@pytest.fixture
def small_cgroup():
    """Creates a cgroup with a quota of one CPU, and yields the file that adds processes to it."""
    version_1, version_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    parent, file, text = version_2, "cpu.max", "100000 100000"
    if (version_1 / "cpu.cfs_period_us").exists():
        parent, file, text = version_1, "cpu.cfs_quota_us", "100000"
    folder = parent / f"rankzero-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        (folder / file).write_text(text)
        yield folder / "cgroup.procs"
    except OSError as error:
        pytest.skip(f"cannot limit a cgroup: {error}")
    finally:
        folder.rmdir()


@pytest.mark.skipif(CORES < 2, reason="a single core")
def test_the_cpu_quota_of_a_cgroup_limits_the_threads(cores_shared, small_cgroup):
    join = ("sh", "-c", f'echo $$ > {small_cgroup}; exec "$@"', "sh", PYTHON, *TRAIN)
    assert threads_of(cores_shared, *join) == ([1], "CPU quota of 1 core", "1 (CPU quota of 1 core)")
