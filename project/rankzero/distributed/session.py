"""The processes that this program works with: started, met and placed on their devices, once per process.

Every Trainer of a program shares them. The command line brings its own rendezvous, which it held before torch was
imported; a script's first Trainer does here what the command line does at its start.
"""

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo, processes_for_gpus, resolve_world
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.validate import check_world, processes_to_start
from rankzero.distributed.error_reporter import refuse, report_error
from rankzero.distributed.join import join_ranks, start_processes
from rankzero.distributed.process.exit_handshake import report_exit
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.rendezvous.client import RendezvousResult
from rankzero.messages import CannotStart, RequestError, Stopped, flush_streams, lost_contact, print_error, was_reported


@dataclass
class Session:
    """The processes of a program.

    Args:
        requested: What was asked for.
        coordinator: All processes, and where this one stands.
        world: What they run on.
        title: What a run without a name is called, before its number.
        is_script: Whether a user's script made it, and not a command of ours.
    """

    requested: RequestedWorld
    coordinator: Coordinator
    world: WorldInfo
    title: str
    is_script: bool = False

    current: ClassVar["Session | None"] = None
    """The session of this process; None before the first Trainer or command."""

    @classmethod
    @contextmanager
    def of_command(cls, requested: RequestedWorld, rendezvous_result: RendezvousResult) -> Iterator["Session"]:
        """The session of a command, whose processes have met. All ranks must call.

        Starts one process per GPU where neither a launcher nor the command line says how many.

        Raises:
            CannotStart: What was asked for is not there, on one machine or another.
            SystemExit: In the process that started the others, once they have ended.
        """
        start_processes(rendezvous_result.launch, processes_for_gpus(requested, rendezvous_result.launch))
        with Coordinator(rendezvous_result, requested) as coordinator:
            cls.current = session = cls(requested, coordinator, resolve_world(requested, coordinator), title="")
            try:
                yield session
            finally:
                cls.current = None

    @classmethod
    def of_trainer(cls, requested: RequestedWorld) -> "Session":
        """The session that a Trainer joins: the command's, or that of the script, which its first Trainer makes.

        Starts the requested processes where no launcher has; the process that a person started then only waits for
        them and leaves with their exit code. All ranks must call.

        Raises:
            CannotStart: The processes that were asked for are not there, or differ from those of an earlier Trainer.
            SystemExit: In the process that waited for the others.
        """
        if cls.current is None:
            cls.current = _of_script(requested)
        elif cls.current.is_script:
            cls.current.check_same(requested)
        return cls.current

    def check_same(self, requested: RequestedWorld) -> None:
        """Holds that a later Trainer asks for the processes that are there.

        Raises:
            RequestError: It asks for others.
        """
        world, launch = self.world, self.coordinator.launch
        present = {"nodes": world.nodes, "devices": world.devices, "accelerator": world.accelerator}
        asked = {"nodes": requested.nodes, "devices": requested.devices, "accelerator": requested.accelerator}
        same_kind = {"auto": True, "gpu": world.accelerator in ("cuda", "mps")}
        for name, value in asked.items():
            if value in (None, present[name]) or (name == "accelerator" and same_kind.get(str(value))):
                continue
            raise RequestError(
                f"--{name} {value} for another Trainer of this program",
                f"{launch.shape} on {world.accelerator}, which an earlier Trainer chose; a process keeps its place",
                f"--{name} {present[name]} (every sample still counts once), or a script of its own",
            )
        gpus = self.requested.gpus or tuple(range(world.devices))
        if world.accelerator == "cuda" and requested.gpus and requested.gpus != gpus:
            raise RequestError(
                f"devices={list(requested.gpus)} for another Trainer of this program",
                f"devices={list(gpus)}, which an earlier Trainer chose; a process keeps its GPU",
                f"devices={list(gpus)}, or a script of its own",
            )


def _of_script(requested: RequestedWorld) -> Session:
    launch = detect(requested)
    check_world(requested, launch)
    count = processes_to_start(requested, launch) or processes_for_gpus(requested, launch)
    if count:
        _check_can_start(count)
    try:
        rendezvous_result = join_ranks(requested, launch, count)
    except Stopped as stopped:
        print_error(str(stopped))
        raise
    silence_warnings(rendezvous_result.launch.rank or 0)
    coordinator = Coordinator(rendezvous_result, requested).__enter__()
    _teams.append(coordinator)
    atexit.register(_leave)
    return Session(requested, coordinator, resolve_world(requested, coordinator), title=_script_name(), is_script=True)


_teams: list[Coordinator] = []
"""The processes that a script has met and not left."""


def report_uncaught_errors() -> None:
    """Has errors that a script does not catch reported as those of a command are: a refusal without a traceback.

    The script's own `sys.excepthook` still gets every other error.
    """
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:  # as an earlier, refused Trainer has set it
        sys.excepthook = partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
    previous: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Reports an error that a script did not catch: a refusal without a traceback, and once per job.

    Args:
        previous: The hook that reports all other errors.
        kind: The error's class.
        error: The error.
        trace: Its traceback.
    """
    launch = _teams[0].launch if _teams else None
    try:
        _leave_others(error)
    except CannotStart as refusal:
        error = refusal
    if isinstance(error, CannotStart):
        code = refuse(error, launch)
        raise SystemExit(code)
    if launch and (was_reported(error) or lost_contact(error)):
        raise SystemExit(report_error(error, launch))
    previous(kind, error, trace)


def _leave() -> None:
    """Leaves the other processes at the end of a script."""
    _leave_others(None)
    flush_streams()
    report_exit()


def _leave_others(error: BaseException | None) -> None:
    if _teams:
        _teams.pop().__exit__(type(error) if error else None, error, None)


def _check_can_start(count: int) -> None:
    """Refuses to start processes where there is no script that each of them could run.

    Raises:
        RequestError: This is a notebook, an interactive interpreter or a program read from standard input.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is not None and Path(script).is_file() and not hasattr(sys, "ps1"):
        return
    where = "a notebook" if "ipykernel" in sys.modules else "an interactive interpreter or standard input"
    raise RequestError(
        f"--devices {count}",
        f"{where}: each process runs the same script file, and here is none",
        "--devices 1 here, or save the program as train.py and run `python train.py`",
    )


def _script_name() -> str:
    """What the program is called: its file without the suffix; `run` where it has none."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    stem = Path(script).stem if Path(script).is_file() else "run"
    name = "".join(letter if letter.isalnum() or letter in "_.+=@-" else "-" for letter in stem)
    return name.lstrip(".-")[:64] or "run"
