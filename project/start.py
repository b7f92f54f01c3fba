"""From the command line to the process that does the work. Imports no torch."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from project.command import Command
from project.command_line import Flags, read_flags
from project.environments.detect import Launch, detect
from project.environments.local import die_with_parent, run_processes
from project.errors import HOUSE, CannotStart, Exit, RequestError, lost_contact, mistake

PROCESSES_A_CORE = 16
"""More than so many processes on one machine are taken for a slip of the finger."""


def start(command: Command, work: Callable[[Flags, Launch], int]) -> int:
    """Reads the command line and does the work, in this process or in one process a device.

    Args:
        command: What the command line may say.
        work: Called with the flags and this process's place among the others; returns the exit code.

    Returns:
        The exit code, see `project.errors.Exit`.
    """
    launch = Launch()
    try:
        launch = detect()
        flags = read_flags(command, sys.argv[1:])
        if flags.get("launcher") != "auto":
            launch = detect(flags.get("launcher"))
        if (devices := processes_to_start(flags, launch)) > 1:
            return run_processes([sys.executable, *sys.argv], devices)
        if launch.launcher == "local" and launch.created:
            die_with_parent()
        _find_modules_in_this_folder()
        return work(flags, launch)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        return tell(error, launch)


def processes_to_start(flags: Flags, launch: Launch) -> int:
    """How many processes this one has to start itself: those that were asked for, where no launcher has."""
    if launch.created or flags.only_prints:
        return 0
    count, most = flags.num_devices or 0, PROCESSES_A_CORE * (os.cpu_count() or 1)
    if count > most:
        raise RequestError(
            f"--devices {count}", f"{os.cpu_count()} cores on this machine", f"--devices {most}, or less"
        )
    return count


def tell(error: Exception, launch: Launch) -> Exit:
    """Says what went wrong, once a machine rather than once a rank, and returns the exit code."""
    if isinstance(error, CannotStart):
        if launch.local_rank == 0:
            print(f"rankzero: cannot start\n{error}", file=sys.stderr, flush=True)
        return Exit.WRONG_REQUEST
    who = f"rank {launch.rank} on {socket.gethostname()}" if launch.world_size > 1 else "this process"
    if lost_contact(error):
        print(f"rankzero: {who} lost contact with another rank ({error})", file=sys.stderr, flush=True)
    elif message := mistake(error):
        print(f"rankzero: {who} failed\n  {message}", file=sys.stderr, flush=True)
    else:
        print("".join(user_frames(error)), file=sys.stderr)
        print(f"rankzero: {who} failed with the error above", file=sys.stderr, flush=True)
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


def _find_modules_in_this_folder() -> None:
    """Lets `--model my_file.MyModel` find my_file.py in the folder one stands in, as `python -m` would."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
