"""Rules about lines: broken commands, directives, signals, and the end of the script."""

import re
from collections.abc import Iterator

from rankzero.jobs.check.script import Finding, Script


def broken_lines(script: Script) -> Iterator[Finding]:
    """Continued commands that end too early."""
    starts = {command.line for command in script.commands if command.is_certain and not command.is_nested}
    for number, line in enumerate(script.lines, 1):
        earlier = script.lines[number - 2].strip() if number > 1 else ""
        is_comment = earlier.startswith("#")
        if re.search(r"\\[ \t]+$", line) and not line.lstrip().startswith("#"):
            found = "a space follows the backslash, so that the command ends here"
            yield number, found, "a backslash at the end of the line"
        if number in starts and re.match(r"\s*--?[A-Za-z]", line) and (is_comment or earlier[-1:] not in "\\ "):
            reason = "a comment" if is_comment else "a missing backslash"
            found = f"this line begins with an option: {reason} in line {number - 1} has ended the command"
            yield number, found, "a backslash at the end of each line but the last"


def directives(script: Script) -> Iterator[Finding]:
    """Directives that the scheduler ignores or refuses."""
    is_text = any(f"\n#{script.prefix} " in word for command in script.commands for word in command.words)
    for number in script.ignored if not is_text else ():
        found = f"#{script.prefix} after the first command (line {script.first_command}) is ignored"
        yield number, found, f"this line before line {script.first_command}"
    for name, value in script.directives.items() if script.scheduler == "slurm" else ():
        line, variable = script.directive_lines[name], re.search(r"\$\w+|\$\{\w+\}", value)
        if name in ("output", "error") and variable:
            yield line, f"Slurm does not expand {variable[0]} in a directive", f"--{name}=/path/to/FILE"
        if name.startswith("mem") and re.fullmatch(r"[0-9]+[KMGTkmgt]?[oO]", value):
            yield line, f"sbatch refuses --{name}={value}; its units are K, M, G and T", f"--{name}={value[:-1]}"


def signals(script: Script) -> Iterator[Finding]:
    """A trap for the signal of `--signal` that never runs, or too late."""
    value = script.directives.get("signal", "") if script.scheduler == "slurm" else ""
    options, _, name = value.partition("@")[0].rpartition(":")
    names = {name, f"SIG{name}", name.removeprefix("SIG")}
    traps = [command.line for command in script.commands if command.program == "trap" and names & {*command.words[2:]}]
    if traps and value and "B" not in options:
        found = f"Slurm sends {name} to the processes of srun only: the trap in line {traps[0]} never runs"
        yield script.directive_lines["signal"], found, f"#SBATCH --signal=B:{value}"
    elif traps and value and not any(command.in_background for command in script.training):
        for command in script.training:
            if command.line > traps[0]:
                found = f"bash runs the trap of line {traps[0]} only after this command has ended"
                yield command.line, found, "& at the end of this command, then wait"


def missing_wait(script: Script) -> Iterator[Finding]:
    """Training in the background of a script that ends."""
    for command in script.training[-1:] if script.scheduler else ():
        later = script.commands[script.commands.index(command) + 1 :]
        if command.in_background and {other.program for other in later} <= {"echo", "date", "exit", ""}:
            found = "the script does not wait for this command: when it ends, the scheduler kills the processes"
            yield command.line, found, "wait, after this line"


RULES = (broken_lines, directives, signals, missing_wait)
