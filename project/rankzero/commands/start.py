"""Starts a command: parses flags, detects the launcher, connects the ranks, shortens the import of torch.

Does not import torch.
"""

import gc
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rankzero.cli.arguments import Arguments, parse_arguments
from rankzero.cli.command import SUBCOMMANDS, Command
from rankzero.cli.user_classes import extend_packages
from rankzero.commands.explain import explain
from rankzero.distributed.coordination.join import join_ranks
from rankzero.distributed.environments.detect import detect
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.environments.validate import check_world, processes_to_start
from rankzero.distributed.process import interrupts
from rankzero.distributed.process.exit_reports import report_exit
from rankzero.distributed.process.spawn import is_local_process
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.stop_and_failure.error_reporter import is_reporting_rank, refuse, report_error
from rankzero.distributed.world import World
from rankzero.messages import CannotStart, Exit, Stopped, flush_streams, print_error, print_notice, set_quiet
from rankzero.sampling.workers import end_workers

SIGNAL = "scipy.signal"
"""Takes 1.4 to 2 s of a start of 6 s. torchmetrics (1.9) only restores its `hamming`, for the package srmrpy."""

PLOT = "torchmetrics.utilities.plot"
"""Imports matplotlib (0.5 s of such a start), which only `Metric.plot` needs."""


def start(
    command: Command,
    work: Callable[[Arguments, World], int],
    arguments: Sequence[str] | None,
    rendezvous_failed: Callable[[CannotStart, Arguments, Launch], int] | None = None,
) -> int:
    """Parses the command line, runs the command, in this process or in one per device, and returns the exit code.

    Args:
        command: The command.
        work: Called with the flags and the processes that the rendezvous has found; returns the exit code.
        arguments: The command line, without the script's name; None for this process's own.
        rendezvous_failed: Reports a failed rendezvous, given the error, the flags and the position of this process, and
            returns the exit code. None reports it as all other errors.
    """
    name, arguments = resolve_subcommand(command, list(sys.argv[1:] if arguments is None else arguments))
    if name != command.name:
        return int(import_module(f"rankzero.commands.{name}").main(arguments))
    launch: Launch | None = None
    try:
        interrupts.restore()
        if command.stops_at_safe_point:
            SIGNALS.install()
        flags = parse_arguments(command, arguments)
        set_quiet(flags.get("quiet") == "yes")
        if command.stops_at_safe_point:
            Stopped.exit_code = flags.get("stopped_exit_code")
        requested = flags.requested_world
        launch = detect(requested)
        if flags.explain:
            return explain(flags, launch)
        check_world(requested, launch)
        if flags.only_prints:
            extend_packages()
            return work(flags, World()) if is_reporting_rank(launch) else Exit.FINISHED  # without a rendezvous
        count = processes_to_start(requested, launch)
        has_announced = _announce_imports(flags, launch)
        world = join_ranks(requested, launch, count)
        launch = world.launch
        if not has_announced:
            _announce_imports(flags, launch)
        extend_packages()
        return work(flags, world)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Stopped as stopped:
        if is_reporting_rank(launch):
            print_error(str(stopped))
        return stopped.exit_code
    except CannotStart as error:
        if error.in_rendezvous and rendezvous_failed and launch:
            return rendezvous_failed(error, flags, launch)
        return refuse(error, launch)
    except Exception as error:
        return report_error(error, launch or Launch())
    finally:
        end_workers()
        flush_streams()
        report_exit()


def _announce_imports(flags: Arguments, launch: Launch) -> bool:
    """Prints once per job what will be loaded, which takes seconds; returns whether this process knows its rank."""
    is_started_by_hand = not launch.externally_created
    if launch.rank is None and not is_started_by_hand:
        return False
    is_first = not launch.node_rank if is_started_by_hand else launch.rank == 0
    if is_first and not is_local_process():
        text = "\n".join(flags.arguments)
        has_data = "data" in flags.explicitly_set or f"--model={flags.command.models.__name__}." in text
        chosen = re.findall(rf"--(?:model{'|data' * has_data})=(?:\S*\.)?(\w+)", text)
        print_notice(f"loading {', '.join(['torch', 'Lightning', *chosen])}")
    return True


def resolve_subcommand(command: Command, arguments: list[str]) -> tuple[str, list[str]]:
    """Returns the name of the command that LightningCLI's subcommand selects, and the command's arguments.

    `fit.py test --name x` is the command `evaluate` with `--split test --name x`.
    """
    if not arguments or arguments[0] not in SUBCOMMANDS:
        return command.name, arguments
    name, flags = SUBCOMMANDS[arguments[0]]
    return name, [*flags, *arguments[1:]]


@contextmanager
def fast_imports() -> Iterator[None]:
    """Shortens the import of torch and Lightning, which takes seconds, by a third; does nothing if torch is imported.

    Afterwards, the same modules are available as after plain imports.
    """
    if "torch" in sys.modules:
        yield
        return
    # Imports create hundreds of thousands of objects and hardly any garbage; Python would scan all of them many times.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with _delayed(SIGNAL), _delayed(PLOT):
            yield
    finally:
        gc.freeze()  # later collections skip these objects, and interrupt steps for less time
        if was_enabled:
            gc.enable()


@contextmanager
def _delayed(module: str) -> Iterator[None]:
    """Delays the import of a module until it is used, or imported after the block."""
    package = module.partition(".")[0]
    if module in sys.modules or find_spec(package) is None or (module == SIGNAL and find_spec("srmrpy")):
        yield
        return
    sys.modules[module] = placeholder = _Placeholder(module)
    if module == SIGNAL:
        vars(import_module(package))["signal"] = placeholder
    try:
        yield
    finally:
        placeholder.remove()


class _Placeholder(ModuleType):
    """Placeholder for a module, which imports the module when it is used."""

    hamming = None

    def remove(self) -> None:
        """Removes the placeholder, so that the next import loads the module."""
        package, _, name = self.__name__.rpartition(".")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if vars(sys.modules.get(package, self)).get(name) is self:
            delattr(sys.modules[package], name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` reads such attributes of every imported module
            raise AttributeError(name)
        if self.__name__ == PLOT:  # read when metrics are imported: types in annotations, and functions
            return object if name.isupper() else partial(self._call, name)
        self.remove()
        return getattr(import_module(self.__name__), name)

    def _call(self, name: str, /, *arguments: Any, **settings: Any) -> Any:
        self.remove()
        return getattr(import_module(self.__name__), name)(*arguments, **settings)
