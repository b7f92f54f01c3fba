"""Rules about the directives of a batch script of Slurm."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.user_script import UserScript


def requeue(script: UserScript) -> Iterator[Finding]:
    """What a run needs to survive the time limit and the loss of a node."""
    if not script.training:
        return
    line = script.first_directive_line
    if script.directive("time") is None:
        found = "without a time limit, the default of the partition applies"
        yield Finding(line, RISKY, found, "#SBATCH --time=HH:MM:SS")
    if script.directive("signal") is None:
        found = "no signal precedes the time limit: Slurm kills the run seconds after its SIGTERM"
        uses_srun = any(command.launchers[:1] == ["srun"] for command in script.training)
        instead = "#SBATCH --signal=USR1@120, if the program saves and stops at SIGUSR1, as fit.py does"
        if not uses_srun:
            instead += "; without srun, B:USR1@120 and a trap that passes it on"
        yield Finding(line, RISKY, found, instead)
    if script.directive("no-requeue") is None:
        if script.directive("requeue") is None:
            found = "whether the job is requeued after the loss of a node depends on the site"
            yield Finding(line, RISKY, found, "#SBATCH --requeue")
        if script.directive("open-mode") is None:
            found = "a requeued job overwrites the output of its earlier attempt"
            yield Finding(line, RISKY, found, "#SBATCH --open-mode=append")


def trapped_signal(script: UserScript) -> Iterator[Finding]:
    """A trap of the script for a signal that never reaches it, or too late."""
    directive = script.directive("signal")
    if directive is None:
        return
    name = directive.value.removeprefix("B:").removeprefix("R:").partition("@")[0].removeprefix("SIG")
    traps = [
        command
        for command in script.commands
        if command.program == "trap" and any(word.text.removeprefix("SIG") == name for word in command.words[2:])
    ]
    if traps and "B:" not in directive.value:
        found = f"Slurm sends {name} to the processes of srun only: the trap in line {traps[0].line} never runs"
        yield Finding(directive.line, WRONG, found, f"#SBATCH --signal=B:{directive.value}")
    if "B:" not in directive.value:
        return
    is_replaced = re.search(r"^\s*exec\s", script.code, re.MULTILINE)  # the program gets the signal
    if not traps and script.training and not is_replaced:
        found = f"no trap handles {name}, which Slurm sends to the job script: it ends, and Slurm kills the processes"
        yield Finding(directive.line, WRONG, found, f"#SBATCH --signal={directive.value.removeprefix('B:')}, or a trap")
    for command in script.training:
        if not traps:
            break
        if not command.position.in_background:
            found = f"bash runs the trap of line {traps[0].line} only after this command has ended"
            yield Finding(command.line, WRONG, found, f"{command.text} &, then wait")


def missing_cores(script: UserScript) -> Iterator[Finding]:
    """Tasks with one core each."""
    names = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket")
    srun_sets_cores = any(command.option("srun", "--cpus-per-task", "-c") for command in script.training)
    if script.training and script.directive(*names) is None and not srun_sets_cores:
        found = "each task gets one core, unless the site has another default; loader processes share it"
        yield Finding(script.first_directive_line, RISKY, found, "#SBATCH --cpus-per-task=N")


def uneven_tasks(script: UserScript) -> Iterator[Finding]:
    """Tasks whose number per node Slurm chooses."""
    total, nodes = script.directive("ntasks"), script.directive("nodes")
    if total is None or script.directive("ntasks-per-node") or not total.value.isdigit() or total.value == "1":
        return
    if nodes is not None and nodes.value in ("1", total.value):
        return
    count = int(total.value)
    found = f"Slurm may put the {count} tasks unevenly on the nodes"
    even = nodes is not None and nodes.value.isdigit() and int(nodes.value) and count % int(nodes.value) == 0
    tasks = count // int(nodes.value) if nodes is not None and even else "N"
    extra = "" if nodes is not None else "#SBATCH --nodes=N, and "
    yield Finding(total.line, RISKY, found, f"{extra}#SBATCH --ntasks-per-node={tasks}")


def output_folder(script: UserScript) -> Iterator[Finding]:
    """Folders of output files, which Slurm does not create."""
    folder, array = script.directive("chdir"), script.directive("array")
    for name in ("output", "error"):
        directive = script.directive(name)
        if directive is None:
            continue
        if variable := re.search(r"\$\w+|\$\{\w+\}", directive.value):
            found = f"Slurm does not expand {variable[0]} in a directive"
            yield Finding(directive.line, WRONG, found, f"#SBATCH --{name}=/path/to/FILE, or sbatch --{name}=...")
        if array is not None and not re.search("%[0-9]*[aj]", directive.value) and directive.value != "/dev/null":
            found = "all members of the job array write to this file"
            yield Finding(directive.line, RISKY, found, f"#SBATCH --{name}=%x-%A_%a.out")
        parent = Path(directive.value).parent
        if "%" in str(parent) or "$" in str(parent) or str(parent) == "." or (folder and "%" in folder.value):
            continue
        if not (Path(folder.value if folder else "") / parent).is_dir():
            found = (
                f"the folder {parent} does not exist here, and Slurm does not create it: the job ends without output"
            )
            yield Finding(directive.line, RISKY, found, f"mkdir -p {shlex.quote(str(parent))}, before sbatch")


def little_memory(script: UserScript) -> Iterator[Finding]:
    """An amount of memory without its unit."""
    for name in ("mem", "mem-per-cpu", "mem-per-gpu"):
        directive = script.directive(name)
        if directive is not None and re.fullmatch(r"[1-9][0-9]{0,2}", directive.value):
            found = f"--{name} without a unit is in megabytes: {directive.value} MB"
            yield Finding(directive.line, RISKY, found, f"#SBATCH --{name}={directive.value}G")


RULES = (requeue, trapped_signal, missing_cores, uneven_tasks, output_folder, little_memory)
