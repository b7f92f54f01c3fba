"""Rules about mpirun: where its processes run, and what they get."""

import re
from collections.abc import Iterator
from itertools import pairwise

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, Finding
from rankzero.commands.jobs.check.machines import chunks_of, processes_per_chunk, shape
from rankzero.commands.jobs.check.user_script import UserScript

_HOSTFILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f")
_HOSTS = ("--host", "-host", "-H", "-hosts", "--hosts")
_COUNT = ("-np", "-n", "--np", "--n", "-c")
_MAPPING = ("--map-by", "-map-by", "-ppn", "--ppn", "-npernode", "--npernode", "-N", "-perhost")


def machines(script: UserScript) -> Iterator[Finding]:
    """In a job of PBS: which machines mpirun uses, and how many processes it accepts."""
    if script.scheduler != "pbs":
        return
    chunks = chunks_of(script)
    select, per_chunk = script.directive("select", "nodes"), processes_per_chunk(script)
    lines = chunks * per_chunk if per_chunk else None
    for command in _commands(script):
        if _is_mpich(command):
            continue
        if chunks != 1 and command.option("mpirun", *_HOSTFILE) is None and command.option("mpirun", *_HOSTS) is None:
            found = "an mpirun that was built without support for PBS starts all processes on the first machine"
            yield Finding(command.line, RISKY, found, _with('--hostfile "$PBS_NODEFILE"', command))
        count = command.option("mpirun", *_COUNT)
        number = script.count(count.text, command) if count else None
        if lines is None or number is None or select is None:
            continue
        if number > lines:
            found = (
                f"the node file has {lines} line{'s' * (lines != 1)}, one per chunk and mpiprocs: "
                f"Open MPI refuses {number} processes"
            )
            instead = (
                f":{'ppn' if select.name == 'nodes' else 'mpiprocs'}={number // (chunks or 1)} in line {select.line}"
            )
            yield Finding(command.line, RISKY, found, instead)
        elif lines == chunks and chunks > 1 and command.option("mpirun", *_MAPPING) is None:
            found = "the node file names each machine once: Open MPI may fill the cores of the first machine first"
            yield Finding(command.line, RISKY, found, _with("--map-by ppr:1:node", command))


def tasks_of_slurm(script: UserScript) -> Iterator[Finding]:
    """More processes than the tasks of a Slurm job, which are the slots of Open MPI."""
    if script.scheduler != "slurm":
        return
    for command in _commands(script):
        nodes, tasks, _ = shape(script, command)
        count = command.option("mpirun", *_COUNT)
        number = script.count(count.text, command) if count else None
        if nodes and tasks and number and number > nodes * tasks and not _is_mpich(command):
            found = f"the job has {nodes * tasks} task{'s' * (nodes * tasks != 1)}: Open MPI refuses {number} processes"
            yield Finding(command.line, RISKY, found, f"#SBATCH --ntasks-per-node={-(-number // nodes)}")


def binding(script: UserScript) -> Iterator[Finding]:
    """Processes that Open MPI binds to a few cores."""
    for command in _commands(script):
        mapping = command.option("mpirun", "--map-by", "-map-by")
        bound = command.option("mpirun", "--bind-to", "-bind-to", "--bind-to-none", "-bind-to-none")
        if bound is None and not _is_mpich(command) and not (mapping and "pe=" in mapping.text.lower()):
            found = "Open MPI binds each process to one core (up to two processes) or one socket"
            yield Finding(command.line, RISKY, found, _with("--bind-to none", command))


def environment(script: UserScript) -> Iterator[Finding]:
    """Reports variables that mpirun does not pass to other machines."""
    for command in _commands(script):
        if command.option("mpirun", *_HOSTFILE) is None and command.option("mpirun", *_HOSTS) is None:
            continue
        passed = {words.partition("=")[0] for words in _values(command, "-x")}
        if _is_mpich(command):
            continue  # it passes all variables on
        for other in script.before(command):
            for name in other.assignments if other.is_export and not other.position.in_function else ():
                if name not in passed and name not in ("PATH", "LD_LIBRARY_PATH"):
                    found = f"Open MPI does not pass {name} to processes on other machines"
                    yield Finding(other.line, RISKY, found, _with(f"-x {name}", command))
        python = next((word.text for word in command.words if re.fullmatch(r"python[0-9.]*", word.text)), None)
        if python and not script.scheduler and "PATH" not in passed:
            found = f"on other machines, {python} is the one on the PATH of an ssh login"
            yield Finding(
                command.line,
                RISKY,
                found,
                re.sub(rf"\s{re.escape(python)}\s", f" /path/to/{python} ", command.text, count=1),
            )


def _commands(script: UserScript) -> list[Command]:
    """Returns the training commands that mpirun starts."""
    return [command for command in script.training if command.launchers[:1] == ["mpirun"]]


def _is_mpich(command: Command) -> bool:
    """Whether mpirun is that of MPICH, Intel MPI or Cray MPI, judging by its name and options."""
    return any(
        word.text.startswith(("-genv", "-env", "--env", "-ppn", "--ppn", "-perhost", "--cpu-bind", "--depth", "-hosts"))
        or word.text.endswith((".hydra", ".mpich"))
        for word in (command.words[0], *command.options_of("mpirun"))
    )


def _values(command: Command, name: str) -> list[str]:
    """Returns the values of a repeated option."""
    words = [word.text for word in command.words]
    return [value for option, value in pairwise(words) if option == name]


def _with(option: str, command: Command) -> str:
    """Returns mpirun with one more option."""
    program = next(word.text for word in command.words if re.search(r"(mpirun|mpiexec|orterun)", word.text))
    return f"{program} {option} ..."


RULES = (machines, tasks_of_slurm, binding, environment)
