"""From the command line to the process that does the work. Imports no torch."""

import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from project import import_names
from project.command import SUBCOMMANDS, Command
from project.command_line import Flags, read_flags
from project.environments import elastic
from project.environments.detect import detect
from project.environments.exit_report import report_exit
from project.environments.launch import Launch
from project.environments.network import quieten_sockets
from project.environments.processes import die_with_parent, is_watched, run_processes
from project.environments.roll_call import Meeting, call_roll
from project.environments.speaker import leave_after_the_speaker, speaks_for_all, speaks_for_machine
from project.environments.threads import choose_threads, set_threads
from project.errors import HOUSE, CannotStart, Exit, RequestError, Stopped, is_told, lost_contact, mistake
from project.explain import explain
from project.request import asked_of, check_shape, processes_to_start
from project.sampling.workers import end_workers
from project.say import say, settle
from project.signals import SIGNALS

LOST_CONTACT_SECONDS = 1.0
"""A rank that lost another leaves so much later, so that what started them names the one that failed first."""


def start(command: Command, work: Callable[[Flags, Meeting], int]) -> int:
    """Reads the command line and does the work, in this process or in one process a device.

    Args:
        command: What the command line may say.
        work: Called with the flags and with all processes, once they are here; returns the exit code.

    Returns:
        The exit code, see `project.errors.Exit`.
    """
    if script := take_subcommand(command):
        runpy.run_path(script, run_name="__main__")  # which leaves with its exit code
    launch: Launch | None = None
    if command.stops_safely:
        SIGNALS.listen()
    try:
        flags = read_flags(command, sys.argv[1:])
        if flags.explain:
            return explain(flags)
        launch = detect(flags.get("launcher"), asked_of(flags))
        check_shape(flags, launch)
        if (devices := processes_to_start(flags, launch)) > 1:
            return run_processes([sys.executable, *sys.argv], devices, launch)
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


def take_subcommand(command: Command) -> str | None:
    """Takes LightningCLI's subcommand off the command line: `fit.py test --name x` runs evaluate.py --split test.

    Returns:
        The path of the script that does it, where that is another one.
    """
    if len(sys.argv) < 2 or sys.argv[1] not in SUBCOMMANDS:
        return None
    name, flags = SUBCOMMANDS[sys.argv[1]]
    script = str(HOUSE / "launch" / f"{name}.py")
    sys.argv = [sys.argv[0] if name == command.name else script, *flags, *sys.argv[2:]]
    return None if name == command.name else script


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
        if "site-packages" not in frame.filename and HOUSE not in Path(frame.filename).parents
    ]
    if not frames:
        return list(whole.format())
    left_out = len(whole.stack) - len(frames)
    head = f"Traceback (most recent call last; {left_out} frames of libraries left out):\n"
    return [head, *traceback.format_list(frames), *whole.format_exception_only()]
