"""Rules about the directives of a batch script of Slurm."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rankzero.commands.jobs.check.finding import RISKY, Finding
from rankzero.commands.jobs.check.user_script import UserScript


def requeue(script: UserScript) -> Iterator[Finding]:
    """What a run needs to survive the time limit and the loss of a node."""
    if not script.training:
        return
    line = script.first_directive_line
    if script.directive("time") is None:
        yield Finding(line, RISKY, "without a time limit, that of the partition applies", "#SBATCH --time=HH:MM:SS")
    if script.directive("signal") is None:
        found = "no signal precedes the time limit: Slurm kills the run seconds after its SIGTERM"
        yield Finding(line, RISKY, found, "#SBATCH --signal=USR1@120")
    if script.directive("no-requeue") is None:
        if script.directive("requeue") is None:
            found = "whether the job is requeued after the loss of a node depends on the site"
            yield Finding(line, RISKY, found, "#SBATCH --requeue")
        if script.directive("open-mode") is None:
            found = "a requeued job overwrites the output of its earlier attempt"
            yield Finding(line, RISKY, found, "#SBATCH --open-mode=append")


def missing_cores(script: UserScript) -> Iterator[Finding]:
    """Tasks with one core each."""
    names = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket")
    asks_srun = any(command.option("srun", "--cpus-per-task", "-c") for command in script.training)
    if script.training and script.directive(*names) is None and not asks_srun:
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
    folder = script.directive("chdir")
    for name in ("output", "error"):
        directive = script.directive(name)
        if directive is None:
            continue
        parent = Path(directive.value).parent
        if "%" in str(parent) or "$" in str(parent) or str(parent) == "." or (folder and "%" in folder.value):
            continue
        if not (Path(folder.value if folder else "") / parent).is_dir():
            found = (
                f"the folder {parent} does not exist here, and Slurm does not create it: the job ends without output"
            )
            yield Finding(directive.line, RISKY, found, f"mkdir -p {shlex.quote(str(parent))}, before sbatch")


RULES = (requeue, missing_cores, uneven_tasks, output_folder)
