"""Rules about how a batch script of Slurm starts its processes."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.rules.machines import shape
from rankzero.commands.jobs.check.rules.torchrun import C10D
from rankzero.commands.jobs.check.user_script import UserScript


def missing_srun(script: UserScript) -> Iterator[Finding]:
    """Commands that run on the first node only."""
    for command in script.training:
        nodes, tasks, _ = shape(script, command)
        cpus = script.directive("cpus-per-task")
        cores = f" --cpus-per-task={cpus.value}" if cpus else ""
        if not command.launchers and (nodes != 1 or tasks != 1):
            found = f"one process starts, on the first node, in a job of {_described(nodes, tasks)}"
            yield Finding(command.line, WRONG, found, f"srun --kill-on-bad-exit=1{cores} {command.text}")
        elif command.launchers in (["torchrun"], ["accelerate"]) and nodes != 1:
            name = command.launchers[0]
            found = f"{name} starts on the first node only, in a job of {_described(nodes, None)}"
            total = nodes or "$SLURM_JOB_NUM_NODES"
            backend = command.option(name, "--rdzv-backend")
            is_complete = backend is not None and backend.text == "c10d"
            text = command.text if is_complete else f"{name} for {total} machines, with {C10D}"
            yield Finding(command.line, WRONG, found, f"srun --ntasks={total} --ntasks-per-node=1{cores} {text}")


def several_launchers(script: UserScript) -> Iterator[Finding]:
    """A torchrun per task, where one per node is needed."""
    for command in script.training:
        tasks = shape(script, command).tasks
        if command.launchers[:2] in (["srun", "torchrun"], ["srun", "accelerate"]) and tasks not in (None, 1):
            name = command.launchers[1]
            found = f"srun starts {name} {tasks} times on each node, and each starts all processes of the node"
            option = command.option("srun", "--ntasks-per-node", "--ntasks", "-n")
            yield Finding(command.line, WRONG, found, f"{'srun' if option else '#SBATCH'} --ntasks-per-node=1")


def inherited_cores(script: UserScript) -> Iterator[Finding]:
    """`--cpus-per-task` that srun does not get."""
    cpus = script.directive("cpus-per-task")
    if cpus is None or "SRUN_CPUS_PER_TASK" in script.text:
        return
    for command in script.training:
        if command.launchers[:1] != ["srun"] or command.is_open("srun"):
            continue
        if command.option("srun", "--cpus-per-task", "-c") is None:
            found = "srun does not inherit --cpus-per-task from sbatch: each task gets one core (Slurm 22.05 and newer)"
            yield Finding(command.line, WRONG, found, f"srun --cpus-per-task={cpus.value} ...")


def failed_task(script: UserScript) -> Iterator[Finding]:
    """Tasks that wait for a task that has failed."""
    for command in script.training:
        if command.launchers[:1] != ["srun"] or command.is_open("srun"):
            continue
        if command.option("srun", "--kill-on-bad-exit", "-K", "-K1") is None:
            nodes, tasks, _ = shape(script, command)
            if (nodes, tasks) != (1, 1):
                found = "if one task fails, the others may wait for it until the time limit"
                yield Finding(command.line, RISKY, found, "srun --kill-on-bad-exit=1 ...")


def isolated_gpus(script: UserScript) -> Iterator[Finding]:
    """Tasks that see only one of the GPUs of their node."""
    for command in script.training:
        if command.launchers != ["srun"] or shape(script, command).tasks in (None, 1):
            continue
        found = "each task sees only its own GPU, so that NCCL cannot use the direct links between GPUs"
        directive = script.directive("gpus-per-task")
        bind = command.option("srun", "--gpu-bind")
        option = command.option("srun", "--gpus-per-task")
        binds = bind is not None and bind.text.startswith(("single", "closest", "map", "per_task"))
        if bind is not None and bind.text == "none":
            continue
        if option is not None or binds:
            yield Finding(command.line, RISKY, found, "srun --gpu-bind=none, with #SBATCH --gpus-per-node=N")
        elif directive is not None:
            yield Finding(directive.line, RISKY, found, "#SBATCH --gpus-per-node=N, and srun --gpu-bind=none")


def counts(script: UserScript) -> Iterator[Finding]:
    """Numbers of machines and processes that contradict the job."""
    for command in script.training:
        nodes, tasks, gpus = shape(script, command)
        inner = command.launchers[1:] if command.launchers[:1] == ["srun"] else command.launchers
        if "torchrun" in inner:
            machines = _number(script, command, "torchrun", "--nnodes")
            processes = _number(script, command, "torchrun", "--nproc-per-node")
            directive = script.directive("nodes")
            of_job = script.count(directive.value, command) if directive else nodes
            if "srun" in command.launchers and tasks == 1 and machines not in (1, of_job):
                yield from _contradiction(command, "--nnodes", machines, nodes, "nodes")
        elif command.launchers == ["srun"] and command.script and command.script.partition(".")[0] != "lightning":
            starts_others = re.search(r"-(num|n|nproc|world)[-_]?(gpus|proc|nodes|machines|per|size)", command.text)
            processes = None if starts_others or command.option("srun", "--ntasks", "-n") else tasks
            machines = _number(script, command, "script", "--nodes", "--num-nodes")
            yield from _contradiction(command, "--nodes", machines, nodes, "nodes")
            devices = _number(script, command, "script", "--devices")
            yield from _contradiction(command, "--devices", devices, tasks, "tasks per node")
        else:
            continue
        if gpus and processes and processes < gpus:
            found = f"of {gpus} GPUs per node, {processes} {'is' if processes == 1 else 'are'} used: one per process"
            yield Finding(command.line, RISKY, found, _per_node(inner, gpus))
        elif gpus and processes and processes > gpus:
            found = f"{processes} processes per node share {gpus} GPU{'s' * (gpus != 1)}"
            yield Finding(command.line, WRONG, found, _per_node(inner, gpus))


def _contradiction(
    command: Command, flag: str, requested: int | None, actual: int | None, unit: str
) -> Iterator[Finding]:
    """Yields a finding if a flag requests another number than that of the job."""
    if requested is not None and actual is not None and requested != actual:
        found = f"{flag} {requested} does not fit the job ({unit}: {actual}): the processes wait for others, or fail"
        yield Finding(command.line, WRONG, found, f"{flag} {actual}")


def _number(script: UserScript, command: Command, launcher: str, *names: str) -> int | None:
    """Returns the value of an option; None without the option or if the value is unknown."""
    option = command.option(launcher, *names)
    return script.count(option.text, command) if option else None


def _per_node(inner: list[str], gpus: int) -> str:
    """Returns the option for one process per GPU."""
    return f"--nproc-per-node={gpus}" if "torchrun" in inner else f"#SBATCH --ntasks-per-node={gpus}"


def _described(nodes: int | None, tasks: int | None) -> str:
    """Returns the size of a job as words."""
    text = "several nodes" if nodes is None else f"{nodes} node{'s' * (nodes != 1)}"
    return text if tasks in (None, 1) else f"{text} with {tasks} tasks each"


RULES = (missing_srun, several_launchers, inherited_cores, failed_task, isolated_gpus, counts)
