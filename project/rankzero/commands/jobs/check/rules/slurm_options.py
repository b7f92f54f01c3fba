"""Rules about the directives of a batch script of Slurm."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.user_script import UserScript


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
        yield Finding(directive.line, found, f"#SBATCH --signal=B:{directive.value}")
    if "B:" not in directive.value:
        return
    is_replaced = re.search(r"^\s*exec\s", script.code, re.MULTILINE)  # the program gets the signal
    if not traps and script.training and not is_replaced:
        found = f"no trap handles {name}, which Slurm sends to the job script: it ends, and Slurm kills the processes"
        yield Finding(directive.line, found, f"#SBATCH --signal={directive.value.removeprefix('B:')}, or a trap")
    for command in script.training:
        if not traps:
            break
        if not command.position.in_background:
            found = f"bash runs the trap of line {traps[0].line} only after this command has ended"
            yield Finding(command.line, found, f"{command.text} &, then wait")


def output_variables(script: UserScript) -> Iterator[Finding]:
    """Variables in the names of output files, which Slurm does not expand."""
    for name in ("output", "error"):
        directive = script.directive(name)
        if directive is None:
            continue
        if variable := re.search(r"\$\w+|\$\{\w+\}", directive.value):
            found = f"Slurm does not expand {variable[0]} in a directive"
            yield Finding(directive.line, found, f"#SBATCH --{name}=/path/to/FILE, or sbatch --{name}=...")


RULES = (trapped_signal, output_variables)
