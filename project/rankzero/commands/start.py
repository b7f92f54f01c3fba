"""From the command line to the process that does the work. Imports no torch."""

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rankzero.cli import import_names
from rankzero.cli.arguments import Flags, read_flags
from rankzero.cli.command import SUBCOMMANDS, Command
from rankzero.commands.explain import explain
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.validate import asked_of, check_shape, processes_to_start
from rankzero.distributed.network import quieten_sockets
from rankzero.distributed.process.exit_report import report_exit
from rankzero.distributed.process.spawn import die_with_parent, is_watched, own_command, run_processes
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.process.threads import choose_threads, set_threads
from rankzero.distributed.rendezvous import elastic
from rankzero.distributed.rendezvous.client import Meeting, call_roll
from rankzero.distributed.reporter import leave_after_the_speaker, speaks_for_all, speaks_for_machine
from rankzero.messages import (
    CannotStart,
    Exit,
    RequestError,
    Stopped,
    is_of_package,
    is_told,
    lost_contact,
    mistake,
    say,
    settle,
)
from rankzero.sampling.workers import end_workers

OURS = ("rankzero", "data_modules", "lightning_modules")

LOST_CONTACT_SECONDS = 1.0
"""A rank that lost another leaves so much later, so that what started them names the one that failed first."""


def start(command: Command, work: Callable[[Flags, Meeting], int]) -> int:
    """Reads the command line and does the work, in this process or in one process a device.

    Args:
        command: What the command line may say.
        work: Called with the flags and with all processes, once they are here; returns the exit code.

    Returns:
        The exit code, see `rankzero.messages.Exit`.
    """
    name, arguments = resolve_subcommand(command, sys.argv[1:])
    if name != command.name:
        return int(import_module(f"rankzero.commands.{name}").main())
    launch: Launch | None = None
    if command.stops_safely:
        SIGNALS.listen()
    try:
        flags = read_flags(command, arguments)
        if flags.explain:
            return explain(flags)
        launch = detect(flags.get("launcher"), asked_of(flags))
        check_shape(flags, launch)
        if (devices := processes_to_start(flags, launch)) > 1:
            return run_processes(own_command(), devices, launch)
        if is_watched():
            die_with_parent()
        quieten_sockets()
        import_names.install()
        meeting = meet(launch, flags)
        launch = meeting.launch
        set_threads(choose_threads(launch, meeting.members))  # before torch and its libraries are imported
        return work(flags, meeting)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Stopped as stopped:
        if speaks_for_all(launch):
            say(str(stopped))
        return Exit.STOPPED
    except CannotStart as error:
        return refuse(error, launch)
    except Exception as error:
        return tell(error, launch or Launch())
    finally:
        end_workers()
        settle()
        report_exit()


def resolve_subcommand(command: Command, arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the command that LightningCLI's subcommand stands for, and its arguments.

    `fit.py test --name x` is the command `evaluate` with `--split test --name x`.
    """
    if not arguments or arguments[0] not in SUBCOMMANDS:
        return command.name, arguments
    name, flags = SUBCOMMANDS[arguments[0]]
    return name, [*flags, *arguments[1:]]


def meet(launch: Launch, flags: Flags) -> Meeting:
    """Waits until all processes are here, and looks once more whether they are as many as were asked for."""
    if launch.elastic and launch.agent_store:
        launch = elastic.meeting_point(launch, float(flags.get("start_timeout")))
    if launch.world_size == 1 or not launch.created or launch.agent_store:
        return Meeting.without_roll_call(launch)
    meeting = call_roll(launch, float(flags.get("start_timeout")), flags.get("interface"))
    check_shape(flags, meeting.launch)
    return meeting


def refuse(error: CannotStart, launch: Launch | None) -> Exit:
    """Says why nothing was started, once a job, and returns the exit code.

    Rank zero says it, unless the ranks have settled who does. Where the machines have terminals of their own, the
    others point there in a line.
    """
    told = error.told if error.told is not None else not speaks_for_all(launch)
    if not told:
        say(f"cannot start\n{error}")
    elif error.told is None and launch and speaks_for_machine(launch, error.own):
        found = error.found.splitlines()[0] if isinstance(error, RequestError) else str(error).strip().splitlines()[0]
        who = f"rank {launch.rank} on {socket.gethostname()}"
        say(f"{who} does not start: {found}")
    leave_after_the_speaker(Exit.WRONG_REQUEST, spoke=not told or error.own)
    return Exit.WRONG_REQUEST


def tell(error: Exception, launch: Launch) -> Exit:
    """Says what went wrong on this rank, and returns the exit code."""
    who = f"rank {launch.rank} on {socket.gethostname()}" if launch.world_size > 1 else "this process"
    if is_told(error):
        time.sleep(LOST_CONTACT_SECONDS)
    elif launch.world_size > 1 and lost_contact(error):
        say(f"{who} lost contact with another rank ({error})")
        time.sleep(LOST_CONTACT_SECONDS)
    elif message := mistake(error):
        say(f"{who} failed\n  {message}")
    else:
        say(f"{who} failed with the error above", above="".join(user_frames(error)))
    return Exit.FAILED


def user_frames(error: Exception) -> list[str]:
    """The traceback without the frames of libraries and of the run itself, where any others are in it."""
    whole = traceback.TracebackException.from_exception(error)
    frames = [
        frame
        for frame in whole.stack
        if "site-packages" not in frame.filename and not is_of_package(Path(frame.filename), *OURS)
    ]
    if not frames:
        return list(whole.format())
    left_out = len(whole.stack) - len(frames)
    head = f"Traceback (most recent call last; {left_out} frames of libraries left out):\n"
    return [head, *traceback.format_list(frames), *whole.format_exception_only()]
