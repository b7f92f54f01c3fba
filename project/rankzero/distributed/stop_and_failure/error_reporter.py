"""Prints the error with which a process ends; before training, decides which process reports it.

During training, the control channel chooses the reporting rank.
"""

import os
import signal
import socket
import time

from rankzero.distributed.connections.local_socket import is_supported, listen_locally
from rankzero.distributed.environments.launch import Launch, Variables
from rankzero.distributed.environments.launchers import LAUNCHERS, slurm
from rankzero.distributed.monitoring.activity import SANITY_CHECK
from rankzero.distributed.process.exit_reports import report_exit
from rankzero.distributed.process.system import process_namespace
from rankzero.distributed.process.user_traceback import is_defect, user_frames, user_position
from rankzero.distributed.timers import TIMERS
from rankzero.messages import (
    CannotStart,
    Exit,
    advice_of,
    is_peer_failure,
    place_of,
    print_error,
    user_message,
    was_reported,
)

RANK_VARIABLES = tuple(dict.fromkeys(name for launcher in LAUNCHERS.values() for name in launcher.rank_variables))
"""Names of the variables in which launchers store a process's rank; the first one that is set counts."""

DEFECT_ADVICE = "This is a defect of Rankzero: please report it with the lines above and the command"

_host_locks: list[socket.socket] = []
"""Sockets that represent this process's host locks, kept open until it exits."""


def is_reporting_rank(launch: Launch | None) -> bool:
    """Whether this process reports errors: rank zero, or the first on its machine if several may be rank zero."""
    if launch is not None and launch.rank is not None and launch.launcher != "env":
        return launch.rank == 0
    variables = Variables(os.environ)
    if (name := next(filter(variables.find, RANK_VARIABLES), None)) is None:
        return True
    if name == "RANK" and "TORCHELASTIC_RUN_ID" not in variables and "PBS_TASKNUM" not in variables:
        # Started by hand or in containers: no launcher gathers the output, so one process per shell and container
        # reports. Two jobs on one machine may both lack MASTER_ADDR; the parent process id distinguishes them.
        job = f"{variables.find('MASTER_ADDR')}:{variables.find('MASTER_PORT')}"
        return acquire_host_lock(f"env {job} {os.getppid()} {process_namespace()}")
    if variables.find(name) != "0":
        return False
    if "PBS_TASKNUM" in variables:
        return (variables.find("PBS_NODENUM") or "0") == "0" and acquire_host_lock(f"pbs {variables.find('PBS_JOBID')}")
    is_single_node = (variables.find("GROUP_WORLD_SIZE") or "1") == "1"
    if slurm.found(variables) and "TORCHELASTIC_RUN_ID" in variables:
        # There may be several torchruns, each with its own rank zero.
        step = f"slurm {variables.find('SLURM_JOB_ID')} {variables.find('SLURM_STEP_ID')}"
        return not (is_single_node and (variables.find("SLURM_NODEID") or "0") != "0") and acquire_host_lock(step)
    mpi_rank = variables.find("OMPI_COMM_WORLD_RANK") or variables.find("PMI_RANK")
    if mpi_rank and "TORCHELASTIC_RUN_ID" in variables:
        return not (is_single_node and mpi_rank != "0") and acquire_host_lock(f"mpi {variables.find('PMIX_NAMESPACE')}")
    return True


def is_node_reporter(launch: Launch, local_only: bool) -> bool:
    """Whether this process prints one line on its machine about an error, in addition to rank zero's report.

    The first process of a machine prints it; if the launcher does not state which one that is, the first that asks.
    `local_only` states whether only this process may have found the error, so that rank zero's report lacks it.
    """
    prints_in_full = launch.rank == 0 or launch.launcher == "env"  # see `is_reporting_rank`
    if prints_in_full or (LAUNCHERS[launch.launcher].gathers_output and not local_only):
        return False
    return launch.local_rank == 0 or (launch.local_rank is None and acquire_host_lock(f"reporter {launch.world_id}"))


def acquire_host_lock(name: str) -> bool:
    """Reserves a name until this process exits; returns whether it is the first process on its machine to do so.

    Always True on systems without the sockets that represent the names.
    """
    if lock := listen_locally(f"lock {name}"):
        _host_locks.append(lock)
    return lock is not None or not is_supported()


def exit_after_reporter(code: int, has_printed: bool) -> None:
    """Delays the exit of this process until rank zero's report has reached the user.

    srun transports output and exit codes separately, so an exit code may overtake the output. A process that has
    acquired a host lock waits until the other processes have seen the lock. If the launcher sends SIGTERM meanwhile,
    this process still exits with `code`.
    """
    if not any(map(os.environ.get, RANK_VARIABLES)):
        return  # no launcher, hence no other ranks

    def exit_at_once(*_: object) -> None:
        report_exit()
        os._exit(code)

    signal.signal(signal.SIGTERM, exit_at_once)
    time.sleep(TIMERS.exit_of_others if _host_locks or not has_printed else TIMERS.exit_of_reporter)


def refuse(error: CannotStart, launch: Launch | None, code: Exit = Exit.WRONG_REQUEST) -> Exit:
    """Reports once per job why nothing was started, and returns the exit code.

    Rank zero reports, unless the ranks have already agreed on a reporting rank. If the launcher does not gather the
    output of all machines, rank zero reports what another machine has found, and each other machine prints one line.
    """
    is_reported = error.reported_elsewhere if error.reported_elsewhere is not None else not is_reporting_rank(launch)
    if is_reported and error.is_remote and launch and not LAUNCHERS[launch.launcher].gathers_output:
        is_reported = not is_reporting_rank(launch)
    may_be_unseen = error.reported_elsewhere is None or error.is_remote
    if not is_reported:
        print_error(f"cannot start\n{error}")
    elif may_be_unseen and launch and is_node_reporter(launch, error.local_only):
        process_name = "a process" if launch.rank is None else f"rank {launch.rank}"
        print_error(f"{process_name} on {socket.gethostname()} did not start: {error.summary}")
    exit_after_reporter(code, has_printed=not is_reported or error.local_only)
    return code


def advice_for(error: BaseException) -> str:
    """Returns what the user can do about an error whose traceback is printed; empty if that is unknown."""
    return advice_of(error) or DEFECT_ADVICE * is_defect(error)


def report_error(error: BaseException, launch: Launch, prints_traceback: bool = True) -> Exit:
    """Reports the failure of this rank, unless another rank has done so, and returns the exit code.

    `prints_traceback` is False if the traceback has been printed.
    """
    process_name = f"rank {launch.rank} on {socket.gethostname()}" if launch.world_size > 1 else "this process"
    traceback = "".join(user_frames(error)) if prints_traceback else ""
    where = f", in {place_of(error)}" if place_of(error) else ""
    where += ", which --trainer.num_sanity_val_steps 0 skips" * (place_of(error) == SANITY_CHECK)
    if was_reported(error):
        time.sleep(TIMERS.exit_after_lost_contact)
    elif launch.world_size > 1 and is_peer_failure(error):
        position = f", {user_position(error)}" if user_position(error) else ""
        print_error(f"{process_name} lost contact with another rank{where}{position} ({error})")
        time.sleep(TIMERS.exit_after_lost_contact)
    elif message := user_message(error):
        print_error(f"{process_name} failed{where}\n  {message}")
    else:
        advice = f".\n  {advice_for(error)}" if advice_for(error) else ""
        print_error(f"{process_name} failed with the error above{where}{advice}", prefix=traceback)
    return Exit.FAILED
