"""The processes of a program: started, connected and assigned to devices, once per process.

All Trainers of a program share one session. A command passes in its rendezvous, which it performed before torch was
imported. In a script, the first Trainer performs the rendezvous.
"""

import atexit
import copyreg
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.join import join_ranks, start_processes
from rankzero.distributed.devices import check_gpus, processes_for_gpus, resolve_world
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.validate import check_world, processes_to_start
from rankzero.distributed.monitoring.activity import Activity
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.distributed.process.exit_reports import report_exit
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.process.stop_signals import is_interactive
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.stop_and_failure.error_reporter import advice_for, refuse, report_error
from rankzero.distributed.world import World
from rankzero.messages import (
    CannotStart,
    RequestError,
    RunError,
    Stopped,
    as_refusal,
    flush_streams,
    is_peer_failure,
    print_error,
    print_notice,
    was_reported,
)


@dataclass
class Session:
    """The connection of this process to the other processes of its program.

    Args:
        requested: The requested processes.
        coordinator: The coordinator of all processes.
        title: First part of the name of a run that the user did not name; a number follows it.
        is_script: Whether the session was opened by a user's script, and not by one of Rankzero's commands.
    """

    requested: RequestedWorld
    coordinator: Coordinator
    title: str
    is_script: bool = False

    current: ClassVar["Session | None"] = None
    """The session of this process; None before the first Trainer or command."""

    @property
    def world(self) -> World:
        """The processes of the program and their devices."""
        return self.coordinator.world

    @classmethod
    @contextmanager
    def for_command(cls, requested: RequestedWorld, world: World) -> Iterator["Session"]:
        """Opens the session of a command after its rendezvous. All ranks must call.

        Starts one process per GPU if neither a launcher nor the command line specifies the number of processes.

        Raises:
            CannotStart: The requested processes, devices or backend are not available on at least one machine.
            SystemExit: In the process that started the local processes, after they have exited.
        """
        start_processes(world.launch, processes_for_gpus(requested, world.launch))
        with Coordinator(world, requested) as coordinator:
            resolve_world(requested, coordinator)
            cls.current = session = cls(requested, coordinator, title="")
            try:
                yield session
            finally:
                cls.current = None

    @classmethod
    def for_trainer(cls, requested: RequestedWorld) -> "Session":
        """Returns the session that a Trainer joins: the command's, or the script's, which its first Trainer opens.

        Starts the requested processes if no launcher has. The process that the user started then only waits for them
        and exits with their exit code. All ranks must call.

        Raises:
            CannotStart: The requested processes are not available, or an earlier Trainer has requested different ones.
            SystemExit: In the process that waited for the local processes.
        """
        if cls.current is None:
            cls.current = _open_script_session(requested)
        elif cls.current.is_script:
            cls.current.check_same_processes(requested)
        return cls.current

    def check_same_processes(self, requested: RequestedWorld) -> None:
        """Checks that a later Trainer requests the same processes as this session.

        Raises:
            RequestError: It requests different nodes, devices, accelerator or GPUs.
        """
        world = self.world
        same_accelerator = {"auto": True, "gpu": world.accelerator in ("cuda", "mps")}
        for name in ("nodes", "devices", "accelerator"):
            value, chosen = getattr(requested, name), getattr(world, name)
            if value in (None, chosen) or (name == "accelerator" and same_accelerator.get(str(value))):
                continue
            raise RequestError(
                f"--{name} {value} for another Trainer of this program",
                f"{world.launch.shape} on {world.accelerator}, which an earlier Trainer of this process chose",
                f"--{name} {chosen} (each sample is still used once), or move this Trainer to a separate script",
            )
        check_gpus(requested, world.accelerator)
        gpus = self.requested.gpus or tuple(range(world.devices))
        if world.accelerator == "cuda" and requested.gpus and requested.gpus != gpus:
            raise RequestError(
                f"devices={list(requested.gpus)} for another Trainer of this program",
                f"devices={list(gpus)}, which an earlier Trainer of this process chose",
                f"devices={list(gpus)}, or move this Trainer to a separate script",
            )


def _open_script_session(requested: RequestedWorld) -> Session:
    launch = detect(requested)
    check_world(requested, launch)
    if count := processes_to_start(requested, launch) or processes_for_gpus(requested, launch):
        _check_can_start(count)
        print_notice(f"starting {count} process{'es' * (count > 1)} of {Path(sys.argv[0]).name or 'this program'}")
    try:
        world = join_ranks(requested, launch, count)
        silence_warnings(world.rank)
        coordinator = Coordinator(world, requested).__enter__()
    except Stopped as stopped:
        print_error(str(stopped))
        raise
    _coordinators.append(coordinator)
    atexit.register(_close_at_exit)
    resolve_world(requested, coordinator)
    return Session(requested, coordinator, title=_script_name(), is_script=True)


def _share(kind: type, path: str) -> None:
    """Makes copies of a Trainer share a part of the session: sockets, threads and locks cannot be copied.

    A Trainer that is unpickled in another process joins the session of that process, or opens one.
    """
    copyreg.pickle(kind, lambda part: (_shared_part, (path, Session.current and Session.current.requested)))


def _shared_part(path: str, requested: RequestedWorld | None) -> object:
    if requested is None or (Session.current is None and multiprocessing.parent_process() is not None):
        raise RuntimeError("a Trainer cannot be unpickled in a loader process: do not store it in the data set")
    session = Session.for_trainer(requested)
    return attrgetter(path)(session) if path else session


_share(Session, "")
_share(Coordinator, "coordinator")
_share(ControlChannel, "coordinator.control_channel")
_share(Monitor, "coordinator.control_channel.monitor")
_share(Activity, "coordinator.control_channel.monitor.activity")

_coordinators: list[Coordinator] = []
"""The coordinators that a script has entered and not left."""


def report_uncaught_errors() -> None:
    """Installs an exception hook that reports a script's uncaught errors like a command's: refusals without traceback.

    The script's own `sys.excepthook` still receives all other errors.
    """
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:  # an earlier, refused Trainer may have set it
        sys.excepthook = partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
    previous: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Reports an error that a script did not catch; `previous`, the script's own hook, prints a traceback.

    At the prompt of an interpreter, the program goes on: the session stays open, and the interpreter does not exit.
    """
    launch = _coordinators[0].world.launch if _coordinators else None
    is_prompt = is_interactive() and (launch is None or launch.world_size == 1)
    if not is_prompt:
        try:
            _close_coordinator(error)
        except CannotStart as refusal:
            error = refusal
    error = as_refusal(error)
    if isinstance(error, CannotStart) and is_prompt:
        print_error(f"cannot start\n{error}")
    elif isinstance(error, CannotStart):
        raise SystemExit(refuse(error, launch))
    elif launch and (was_reported(error) or is_peer_failure(error) or isinstance(error, RunError)):
        code = report_error(error, launch)
        if not is_prompt:
            raise SystemExit(code)
    else:
        previous(kind, error, trace)
        if launch and launch.world_size > 1 and not isinstance(error, KeyboardInterrupt):
            report_error(error, launch, prints_traceback=False)
        elif advice := advice_for(error):
            print_error(advice)


def _close_at_exit() -> None:
    """Disconnects from the other processes at the end of a script."""
    _close_coordinator(None)
    flush_streams()
    report_exit()


def _close_coordinator(error: BaseException | None) -> None:
    if _coordinators:
        _coordinators.pop().__exit__(type(error) if error else None, error, None)


def _check_can_start(count: int) -> None:
    """Refuses to start processes if there is no script file for them to run."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and Path(script).is_file() and not hasattr(sys, "ps1"):
        return
    program = "a notebook" if "ipykernel" in sys.modules else "an interactive interpreter or standard input"
    found = f"{program}: several processes need a script file, and there is none"
    instead = "--devices 1, or save the program as train.py and run `python train.py`"
    raise RequestError(f"--devices {count}", found, instead)


def _script_name() -> str:
    """Returns the script's file name without suffix, restricted to characters that a run name allows; else `run`."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    stem = Path(script).stem if Path(script).is_file() else "run"
    name = "".join(character if character.isalnum() or character in "_.+=@-" else "-" for character in stem)
    return name.lstrip(".-")[:64] or "run"
