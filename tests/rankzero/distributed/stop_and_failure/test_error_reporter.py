import os
import signal
import socket
import subprocess
import sys

import pytest

from rankzero import messages
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.activity import SANITY_CHECK
from rankzero.distributed.stop_and_failure import error_reporter
from rankzero.distributed.stop_and_failure.error_reporter import RANK_VARIABLES, acquire_host_lock, is_reporting_rank
from rankzero.messages import AnotherRankFailed, CannotStart, Exit, RequestError, RunError

HOST = socket.gethostname()
JOB = f"job of process {os.getpid()}"
"""Name of a host lock. Other test runs on the machine share the locks, so the name contains a process id."""

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1"}
PBS = {"PBS_TASKNUM": "2", "PBS_NODENUM": "0"}
ACQUIRE_LOCK = f"""
from rankzero.distributed.stop_and_failure.error_reporter import acquire_host_lock
print(acquire_host_lock({JOB!r}))
"""
TERMINATED = """
import os, signal, threading, time
from rankzero.distributed.stop_and_failure import error_reporter
def end():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end).start()
error_reporter.TIMERS.exit_of_others = 60
error_reporter.exit_after_reporter(75, False)
"""
FULL_REPORT = (
    "rankzero: cannot start\n  asked  --devices 3\n  found  2 devices\n         and more\n  type   --devices 2\n"
)
ELSEWHERE, REMOTE = {"reported_elsewhere": True}, {"reported_elsewhere": True, "is_remote": True}
RANK_1 = Launch(world_size=2, rank=1)
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture(autouse=True)
def locks(monkeypatch):
    """Records the host locks that a test acquires, and releases them after the test."""
    acquired = []
    monkeypatch.setattr(error_reporter, "_host_locks", acquired)
    yield acquired
    for lock in acquired:
        lock.close()


@pytest.fixture
def variables(monkeypatch):
    """Returns a function that sets a launcher's variables; all other rank variables are unset."""
    for name in (*RANK_VARIABLES, "SLURM_STEP_ID", "SLURM_JOB_ID", "PBS_TASKNUM", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def set_variables(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def pauses(monkeypatch):
    """Records the pauses of the reporter, in seconds, without sleeping."""
    seconds = []
    monkeypatch.setattr(error_reporter.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    ("values", "reports"),
    [
        *[({}, True), (TORCHRUN | {"RANK": "0"}, True), (TORCHRUN | {"RANK": "1"}, False)],
        *[({"SLURM_PROCID": "0"}, True), ({"SLURM_PROCID": "3"}, False), ({"PMIX_RANK": "1"}, False)],
        ({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}, False),
        ({"PMI_RANK": "0", "SLURM_PROCID": "1"}, True),
        (PBS | {"PBS_NODENUM": "1"}, False),
        (PBS | {"RANK": "0", "PBS_NODENUM": "1"}, False),
        (TORCHRUN | SLURM | {"RANK": "0", "SLURM_NODEID": "1"}, False),
        (TORCHRUN | MPI | {"RANK": "0"}, False),
    ],
)
def test_the_rank_of_the_launch_or_else_variables_determine_the_reporting_rank(variables, values, reports):
    variables(**values)
    assert is_reporting_rank(None) == is_reporting_rank(Launch(launcher="env")) == reports
    assert is_reporting_rank(Launch(launcher="pbs", rank=None)) == reports
    variables(RANK="1" if reports else "0", TORCHELASTIC_RUN_ID="x")
    assert [is_reporting_rank(Launch(launcher="torchrun", rank=rank)) for rank in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("values", "job"),
    [
        *[({"RANK": "1"}, "MASTER_ADDR"), ({"RANK": "0"}, "MASTER_PORT"), (PBS, "PBS_JOBID")],
        (TORCHRUN | SLURM | {"RANK": "0", "SLURM_NODEID": "0"}, "SLURM_JOB_ID"),
        (TORCHRUN | SLURM | {"RANK": "0", "SLURM_NODEID": "1", "GROUP_WORLD_SIZE": "2"}, "SLURM_JOB_ID"),
        (TORCHRUN | MPI | {"RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "PMIX_NAMESPACE"),
        (TORCHRUN | MPI | {"RANK": "0", "GROUP_WORLD_SIZE": "2"}, "PMIX_NAMESPACE"),
    ],
    ids=["rank 1 by hand", "rank 0 by hand", "pbs", "slurm", "slurm, node 1", "mpi", "mpi, rank 1"],
)
def test_the_first_process_of_a_job_reports_if_several_may_be_rank_zero(variables, values, job):
    variables(**values, **{job: JOB})
    assert [is_reporting_rank(None), is_reporting_rank(None)] == [True, False]
    variables(**{job: f"another {JOB}"})
    assert is_reporting_rank(None)


def test_the_first_process_that_asks_reports_if_the_launcher_states_no_local_rank():
    launch = Launch(launcher="pbs", rank=None, local_rank=None, world_id=JOB)
    assert [error_reporter.is_node_reporter(launch, True) for _ in range(2)] == [True, False]


def test_one_process_holds_a_host_lock_of_any_name_until_it_exits(locks):
    def acquired_elsewhere():
        return subprocess.run([sys.executable, "-c", ACQUIRE_LOCK], capture_output=True, text=True, check=True).stdout

    assert acquired_elsewhere() == "True\n"
    assert acquire_host_lock(JOB) and not acquire_host_lock(JOB) and len(locks) == 1
    assert acquired_elsewhere() == "False\n"
    names = [f"{JOB} {'x' * 1000}", f"{JOB} {'x' * 999}y", f"{JOB} ä\0\n"]
    assert [acquire_host_lock(name) for name in names * 2] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("name", "has_printed", "has_lock", "pause"),
    [
        *((name, False, False, [2.5]) for name in RANK_VARIABLES),
        ("RANK", False, True, [2.5]),
        ("RANK", True, True, [2.5]),
        ("RANK", True, False, [0.3]),
        ("WITHOUT_A_LAUNCHER", False, False, []),
    ],
)
def test_only_a_reporter_without_a_lock_has_a_short_delay(variables, pauses, name, has_printed, has_lock, pause):
    variables(**{name: "1"})
    if has_lock:
        acquire_host_lock(JOB)
    before = signal.getsignal(signal.SIGTERM)
    try:
        error_reporter.exit_after_reporter(2, has_printed)
        assert (signal.getsignal(signal.SIGTERM) is before) == (pause == [])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert pauses == pause


def test_sigterm_during_the_exit_delay_keeps_the_exit_code():
    assert subprocess.run([sys.executable, "-c", TERMINATED], env={**os.environ, "RANK": "1"}).returncode == 75


def printed_refusal(capsys, launch, error=None, **attributes):
    error = error or RequestError("--devices 3", "2 devices\nand more", "--devices 2")
    for name, value in attributes.items():
        setattr(error, name, value)
    assert error_reporter.refuse(error, launch) is Exit.WRONG_REQUEST
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("launch", "attributes", "printed"),
    [
        *[(None, {}, FULL_REPORT), (Launch(), {}, FULL_REPORT)],
        (Launch(launcher="slurm", rank=0), ELSEWHERE, ""),
        (Launch(launcher="slurm", rank=1), {"reported_elsewhere": False}, FULL_REPORT),
        (Launch(launcher="slurm", rank=1), {}, ""),
        (Launch(launcher="slurm", rank=1, local_rank=0), {"local_only": True}, "2 devices"),
        (Launch(launcher="mpi", rank=1, local_rank=0), {"local_only": True}, "2 devices"),
        *((Launch(launcher="mpi", rank=1, local_rank=rank), {"local_only": rank == 1}, "") for rank in (0, 1)),
        (Launch(launcher="torchrun", rank=1, local_rank=0), {}, "2 devices"),
        (Launch(launcher="torchrun", rank=1, local_rank=0), ELSEWHERE, ""),
        (Launch(launcher="torchrun", rank=1, local_rank=0), REMOTE, "2 devices"),
        *((Launch(launcher="torchrun", rank=1, local_rank=1), attributes, "") for attributes in ({}, REMOTE)),
        (Launch(launcher="torchrun", rank=0, local_rank=0), REMOTE, FULL_REPORT),
        (Launch(launcher="env", rank=1, local_rank=0), REMOTE, FULL_REPORT),
        *((Launch(launcher="slurm", rank=rank, local_rank=0), REMOTE, "") for rank in (0, 1)),
    ],
)
def test_a_refusal_is_printed_in_full_once_per_job(variables, capsys, launch, attributes, printed):
    text = printed_refusal(capsys, launch, **attributes)
    did_not_start = f"rankzero: rank 1 on {HOST} did not start:"
    assert text == (f"{did_not_start} {printed}\n" if printed == "2 devices" else printed)
    error = CannotStart("  no data\nat all")  # a refusal in free text
    assert printed_refusal(capsys, None, error) == "rankzero: cannot start\n  no data\nat all\n"
    assert printed_refusal(capsys, Launch(launcher="torchrun", rank=1), error) == f"{did_not_start} no data\n"


@pytest.mark.parametrize(
    ("error", "launch", "printed", "seconds"),
    [
        (RunError("the disk is full"), RANK_1, f"rank 1 on {HOST} failed\n  the disk is full\n", []),
        (RunError("the disk is full"), Launch(), "this process failed\n  the disk is full\n", []),
        (AnotherRankFailed("rank 0"), RANK_1, f"rank 1 on {HOST} lost contact with another rank (rank 0)\n", [1]),
        (LOST, RANK_1, f"rank 1 on {HOST} lost contact with another rank ({LOST})\n", [1]),
        (LOST, Launch(), f"RuntimeError: {LOST}\nrankzero: this process failed", []),
        (KeyError("x"), RANK_1, f"KeyError: 'x'\nrankzero: rank 1 on {HOST} failed with the error above\n", []),
    ],
)  # fmt: skip
def test_a_failure_report_names_the_rank_and_the_cause(capsys, pauses, error, launch, printed, seconds):
    assert error_reporter.report_error(error, launch) is Exit.FAILED
    text = capsys.readouterr().err
    assert printed in text and text.count("rankzero: ") == 1 and pauses == seconds
    assert text.startswith("rankzero: ") == ("Error: " not in printed)


def test_an_error_of_the_sanity_check_names_its_flag_and_an_error_reported_elsewhere_is_not_printed(capsys, pauses):
    error = KeyError("x")
    messages.mark_place(error, SANITY_CHECK)
    error_reporter.report_error(error, Launch())
    place = "in the sanity check before training, which --trainer.num_sanity_val_steps 0 skips\n"
    assert capsys.readouterr().err.endswith(place) and pauses == []
    error = RuntimeError(str(LOST))
    messages.mark_reported(error)
    assert error_reporter.report_error(error, RANK_1) is Exit.FAILED
    assert capsys.readouterr().err == "" and pauses == [1]


def test_the_report_of_an_error_ends_with_its_advice(capsys, pauses):
    text = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    assert error_reporter.report_error(RuntimeError(text), RANK_1) is Exit.FAILED
    printed = capsys.readouterr().err
    assert "failed with the error above.\n  The line above is where the error of the GPU was noticed" in printed
    assert "With the environment variable CUDA_LAUNCH_BLOCKING=1, the traceback ends at that line\n" in printed
    error = RuntimeError("CUDA out of memory")
    messages.mark_advice(error, "type --max_device_batch_size 16")
    error_reporter.report_error(error, Launch())
    assert capsys.readouterr().err.endswith("failed with the error above.\n  type --max_device_batch_size 16\n")
