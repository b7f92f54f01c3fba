"""The number of threads of each rank under real launchers, and the reason in the start line."""

import os
import re
from pathlib import Path

import pytest

from rankzero.distributed.process.system import usable_cores
from running import require, run
from system.learned import OBSERVE, TRAIN, observed

CORES = len(usable_cores())
ALL_CORES = f"{CORES} core{'s' * (CORES > 1)}"
SHARED, REASON = max(1, CORES // 2), f"{ALL_CORES} / 2 ranks"
SETTING = f"OMP_NUM_THREADS={CORES}"
ONE_CORE = str(min(os.sched_getaffinity(0)))

TWO_BATCHES = (*OBSERVE, "--trainer.limit_train_batches", "2")
RANK = ("python", *TRAIN)
TWO_RANKS = (*RANK, "--devices", "2")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2")


def threads_of(folder, *command, environment=None):
    """Returns the number of threads of each rank, the reason in the start line, and what --explain prints."""
    printed = run(*command, *TWO_BATCHES, folder=folder, environment=environment).out
    counts, reason, _ = observed(folder, printed)
    explanation = run(*command, "--explain", folder=folder, environment=environment).out
    return counts, reason, re.search(r"^threads: +(.*)$", explanation, re.MULTILINE)[1]


@pytest.mark.parametrize(
    ("command", "counts", "reason", "explained"),
    [
        (("taskset", "-c", ONE_CORE, *TWO_RANKS), [1, 1], "1 core / 2 ranks", "1 each (1 core / 2 ranks)"),
        ((*MPIRUN, "--bind-to", "none", *RANK), [SHARED] * 2, REASON, f"{SHARED} each ({REASON})"),
        pytest.param(
            *((*MPIRUN, "--bind-to", "core", *RANK), [1, 1], "bound to 1 core", "1 each (bound to 1 core)"),
            marks=pytest.mark.skipif(CORES < 2, reason="a single core"),
        ),
        (RANK, [CORES], ALL_CORES, f"{CORES} ({ALL_CORES})"),
        (("env", SETTING, *TWO_RANKS), [CORES] * 2, SETTING, f"as set by {SETTING}"),
    ],
    ids=["taskset", "mpirun", "mpirun that binds", "one process", "OMP_NUM_THREADS"],
)
def test_the_ranks_of_a_machine_share_the_cores_that_they_may_use(cores_shared, command, counts, reason, explained):
    if command[0] == MPIRUN[0]:
        require("openmpi")
    assert threads_of(cores_shared, *command) == (counts, reason, explained)


@pytest.mark.xdist_group("slurm")
def test_tasks_of_srun_share_the_cores_of_their_machine(cores_shared, slurm):
    environment = {name: value for name, value in slurm.items() if name != "OMP_NUM_THREADS"}
    found = threads_of(cores_shared, "srun", "--nodes=1", "--ntasks=2", *RANK, environment=environment)
    assert found == ([SHARED] * 2, REASON, f"{SHARED} each ({REASON})")


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
    join = ("sh", "-c", f'echo $$ > {small_cgroup}; exec "$@"', "sh", *RANK)
    assert threads_of(cores_shared, *join) == ([1], "CPU quota of 1 core", "1 (CPU quota of 1 core)")
