"""Rules about how a batch script of Slurm starts its processes."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.machines import C10D, shape
from rankzero.commands.jobs.check.rules.accelerate import several_machines
from rankzero.commands.jobs.check.user_script import UserScript


def missing_srun(script: UserScript) -> Iterator[Finding]:
    """Commands that run on the first node only."""
    for command in script.training:
        nodes, tasks, _ = shape(script, command)
        cpus = script.directive("cpus-per-task")
        cores = f" --cpus-per-task={cpus.value}" if cpus else ""
        if not command.launchers and re.search(r"\bsrun\b.*\b(ray|dask)\b", script.code):
            continue  # their servers run on all nodes
        if not command.launchers and (nodes != 1 or tasks != 1):
            found = f"one process starts, on the first node, in a job of {_described(nodes, tasks)}"
            yield Finding(command.line, found, f"srun --kill-on-bad-exit=1{cores} {command.text}")
        elif command.launchers in (["torchrun"], ["accelerate"]) and nodes != 1:
            name = command.launchers[0]
            found = f"{name} starts on the first node only, in a job of {_described(nodes, None)}"
            total = nodes or "$SLURM_JOB_NUM_NODES"
            backend = command.option(name, "--rdzv-backend")
            is_complete = backend is not None and backend.text == "c10d"
            options = C10D if name == "torchrun" else several_machines(total)
            text = command.text if is_complete else f"{name} for {total} machines, with {options}"
            yield Finding(command.line, found, f"srun --ntasks={total} --ntasks-per-node=1{cores} {text}")


def several_launchers(script: UserScript) -> Iterator[Finding]:
    """A torchrun per task, where one per node is needed."""
    for command in script.training:
        tasks = shape(script, command).tasks
        if command.launchers[:2] in (["srun", "torchrun"], ["srun", "accelerate"]) and tasks not in (None, 1):
            name = command.launchers[1]
            found = f"srun starts {name} {tasks} times on each node, and each starts all processes of the node"
            option = command.option("srun", "--ntasks-per-node", "--ntasks", "-n")
            yield Finding(command.line, found, f"{'srun' if option else '#SBATCH'} --ntasks-per-node=1")


def counts(script: UserScript) -> Iterator[Finding]:
    """Numbers of machines and processes that contradict the job."""
    for command in script.training:
        nodes, tasks, gpus = shape(script, command)
        inner = command.launchers[1:] if command.launchers[:1] == ["srun"] else command.launchers
        if "torchrun" in inner:
            machines = _number(script, command, "torchrun", "--nnodes")
            processes = _number(script, command, "torchrun", "--nproc-per-node")
            yield from _unset_gpus(script, command)
            directive = script.directive("nodes")
            of_job = script.count(directive.value, command) if directive else nodes
            if "srun" in command.launchers and tasks == 1 and machines not in (1, of_job):
                yield from _contradiction(command, "--nnodes", machines, nodes, "nodes")
        elif command.launchers == ["srun"] and command.script and command.script.partition(".")[0] != "lightning":
            starts_others = re.search(r"-(num|n|nproc|world)[-_]?(gpus|proc|nodes|machines|per|size)", command.text)
            processes = None if starts_others or command.option("srun", "--ntasks", "-n") else tasks
            for flag in ("--nodes", "--num-nodes"):
                machines = _number(script, command, "script", flag)
                typed = "--num_nodes" if flag == "--num-nodes" and "--num_nodes" in command.text else flag
                yield from _contradiction(command, typed, machines, nodes, "nodes")
            devices = _number(script, command, "script", "--devices")
            yield from _contradiction(command, "--devices", devices, tasks, "tasks per node")
        else:
            continue
        if gpus and processes and processes > gpus:
            found = f"{processes} processes per node share {gpus} GPU{'s' * (gpus != 1)}"
            yield Finding(command.line, found, _per_node(script, inner, gpus))


def _contradiction(
    command: Command, flag: str, requested: int | None, actual: int | None, unit: str
) -> Iterator[Finding]:
    """Yields a finding if the value of a flag differs from the job's."""
    if requested is not None and actual is not None and requested != actual:
        found = f"{flag} {requested} does not match the job ({unit}: {actual}): the processes wait for others, or fail"
        yield Finding(command.line, found, f"{flag} {actual}")


def _unset_gpus(script: UserScript, command: Command) -> Iterator[Finding]:
    """Yields a finding for $SLURM_GPUS_PER_NODE, which is what --gpus-per-node requests, such as a100:4."""
    option, request = command.option("torchrun", "--nproc-per-node"), script.directive("gpus-per-node")
    is_used = option is not None and re.fullmatch(r"\$\{?SLURM_GPUS_PER_NODE\}?", option.text)
    if is_used and (request is None or not request.value.isdigit()):
        value = f"is {request.value}" if request else "is not set without --gpus-per-node"
        yield Finding(command.line, f"$SLURM_GPUS_PER_NODE {value}", "$SLURM_GPUS_ON_NODE")


def _number(script: UserScript, command: Command, launcher: str, *names: str) -> int | None:
    """Returns the value of an option; None without the option or if the value is unknown."""
    option = command.option(launcher, *names)
    return script.count(option.text, command) if option else None


def _per_node(script: UserScript, inner: list[str], gpus: int) -> str:
    """Returns the option for one process per GPU."""
    if "torchrun" in inner:
        return f"--nproc-per-node={gpus}"
    return f"#SBATCH --ntasks-per-node={gpus}" + (", without --ntasks" if script.directive("ntasks") else "")


def exported_environment(script: UserScript) -> Iterator[Finding]:
    """Tasks that do not get the variables of the job script, such as PATH."""
    directive = script.directive("export")
    for command in script.training:
        if command.launchers[:1] != ["srun"] or "SLURM_EXPORT_ENV" in script.code:
            continue
        option = command.option("srun", "--export")
        inherited = "NONE" if directive and directive.value == "NONE" else "ALL"
        value = inherited if option is None else option.text
        names = [item.partition("=")[0] for item in value.split(",")]
        if not {"ALL", "PATH"} & {name.upper() for name in names} and "$" not in names[0]:
            name = names[0]
            found = f"with --export={name}, the tasks do not get PATH and the variables of this script"
            instead = "srun --export=ALL ..." if value.upper() == "NONE" else f"srun --export=ALL,{value} ..."
            yield Finding(command.line, found, instead)


def _described(nodes: int | None, tasks: int | None) -> str:
    """Returns the size of a job as words."""
    text = "several nodes" if nodes is None else f"{nodes} node{'s' * (nodes != 1)}"
    return text if tasks in (None, 1) else f"{text} with {tasks} tasks each"


RULES = (missing_srun, several_launchers, counts, exported_environment)
