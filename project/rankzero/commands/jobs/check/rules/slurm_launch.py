"""Rules about how a batch script of Slurm starts its processes."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.command import Command
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
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
            yield Finding(command.line, WRONG, found, f"srun --kill-on-bad-exit=1{cores} {command.text}")
        elif command.launchers in (["torchrun"], ["accelerate"]) and nodes != 1:
            name = command.launchers[0]
            found = f"{name} starts on the first node only, in a job of {_described(nodes, None)}"
            total = nodes or "$SLURM_JOB_NUM_NODES"
            backend = command.option(name, "--rdzv-backend")
            is_complete = backend is not None and backend.text == "c10d"
            options = C10D if name == "torchrun" else several_machines(total)
            text = command.text if is_complete else f"{name} for {total} machines, with {options}"
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
    """`--cpus-per-task` that srun gets from sbatch, but not in every version."""
    cpus = script.directive("cpus-per-task")
    if cpus is None or "SRUN_CPUS_PER_TASK" in script.code:
        return
    for command in script.training:
        if command.launchers[:1] != ["srun"] or command.is_open("srun"):
            continue
        if command.option("srun", "--cpus-per-task", "-c") is None:
            found = "in Slurm 22.05 and 23.02, srun does not inherit --cpus-per-task: each task gets one core"
            yield Finding(command.line, RISKY, found, f"srun --cpus-per-task={cpus.value} ...")


def failed_task(script: UserScript) -> Iterator[Finding]:
    """Tasks that wait for a task that has failed."""
    if "SLURM_KILL_BAD_EXIT" in script.code:
        return
    for command in script.training:
        if command.launchers[:1] != ["srun"] or command.is_open("srun"):
            continue
        if command.option("srun", "--kill-on-bad-exit", "-K", "-K1") is None:
            nodes, tasks, _ = shape(script, command)
            machines = command.option("torchrun", "--nnodes")
            is_elastic = machines is not None and ":" in machines.text
            if (nodes, tasks) != (1, 1) and not is_elastic:
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
        default = script.directive("gpu-bind")
        if (bind.text if bind is not None else default.value if default else "") == "none":
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
        if gpus and processes and processes < gpus:
            found = f"of {gpus} GPUs per node, {processes} {'is' if processes == 1 else 'are'} used: one per process"
            yield Finding(command.line, RISKY, found, _per_node(script, inner, gpus))
        elif gpus and processes and processes > gpus:
            found = f"{processes} processes per node share {gpus} GPU{'s' * (gpus != 1)}"
            yield Finding(command.line, WRONG, found, _per_node(script, inner, gpus))


def _contradiction(
    command: Command, flag: str, requested: int | None, actual: int | None, unit: str
) -> Iterator[Finding]:
    """Yields a finding if the value of a flag differs from the job's."""
    if requested is not None and actual is not None and requested != actual:
        found = f"{flag} {requested} does not match the job ({unit}: {actual}): the processes wait for others, or fail"
        yield Finding(command.line, WRONG, found, f"{flag} {actual}")


def _unset_gpus(script: UserScript, command: Command) -> Iterator[Finding]:
    """Yields a finding for $SLURM_GPUS_PER_NODE, which is what --gpus-per-node requests, such as a100:4."""
    option, request = command.option("torchrun", "--nproc-per-node"), script.directive("gpus-per-node")
    is_used = option is not None and re.fullmatch(r"\$\{?SLURM_GPUS_PER_NODE\}?", option.text)
    if is_used and (request is None or not request.value.isdigit()):
        value = f"is {request.value}" if request else "is not set without --gpus-per-node"
        yield Finding(command.line, WRONG, f"$SLURM_GPUS_PER_NODE {value}", "$SLURM_GPUS_ON_NODE")


def containers(script: UserScript) -> Iterator[Finding]:
    """Containers that do not see the GPUs of the job."""
    for command in script.training:
        words = [word.text for word in command.words]
        program = next((word for word in words if word in ("apptainer", "singularity")), None)
        has_option = bool({"--nv", "--rocm", "--nvccli"} & set(words)) or command.is_open("srun")
        sees_gpus = has_option or re.search(r"(APPTAINER|SINGULARITY)_NV", script.code)
        if program and shape(script, command).gpus and not sees_gpus:
            found = "the container does not see the GPUs of the job"
            yield Finding(command.line, RISKY, found, f"{program} exec --nv ...")


def blocking_steps(script: UserScript) -> Iterator[Finding]:
    """Steps in the background that keep the processors of the job."""
    for command in script.training:
        if command.launchers[:1] != ["srun"]:
            continue
        for other in script.before(command):
            if any(later.program == "wait" and later.line < command.line for later in script.after(other)):
                continue
            is_step = other.launchers == ["srun"] and other.position.in_background and not other.trains
            if is_step and not other.position.loop and other.option("srun", "--overlap") is None:
                found = f"line {command.line} may wait until this step ends: steps do not share processors"
                yield Finding(other.line, RISKY, found, "srun --overlap ...")


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
            yield Finding(command.line, WRONG, found, instead)


def _described(nodes: int | None, tasks: int | None) -> str:
    """Returns the size of a job as words."""
    text = "several nodes" if nodes is None else f"{nodes} node{'s' * (nodes != 1)}"
    return text if tasks in (None, 1) else f"{text} with {tasks} tasks each"


RULES = (
    missing_srun,
    several_launchers,
    inherited_cores,
    failed_task,
    isolated_gpus,
    counts,
    exported_environment,
    containers,
    blocking_steps,
)
