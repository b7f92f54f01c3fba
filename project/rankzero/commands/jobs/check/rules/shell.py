"""Rules about the script as a shell program: its first line, broken lines, ignored directives."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.directives import PREFIXES
from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.user_script import UserScript

_PROGRAMS = r"\b(srun|torchrun|mpirun|mpiexec|pbsdsh|accelerate|deepspeed|python[0-9.]*)\b"

BYTE_ORDER_MARK = "\ufeff"


def first_line(script: UserScript) -> Iterator[Finding]:
    """Slurm refuses a script without an interpreter."""
    if script.scheduler == "slurm" and not script.text.startswith("#!"):
        yield Finding(1, "sbatch refuses a script whose first line is not #!", "#!/bin/bash")


def encoding(text: str) -> Iterator[Finding]:
    """Reports a byte order mark and line ends of Windows."""
    if text.startswith(BYTE_ORDER_MARK):
        found = "the file begins with a byte order mark, so that its first line does not begin with #!"
        yield Finding(1, found, "save the file as UTF-8 without a byte order mark")
    line = next((number for number, line in enumerate(text.split("\n"), 1) if line.endswith("\r")), None)
    if line:
        found = "lines end with CR LF, as on Windows: sbatch refuses them, and bash adds the CR to the last word"
        yield Finding(line, found, "sed -i 's/\\r$//' FILE")


def broken_lines(script: UserScript) -> Iterator[Finding]:
    """Continued commands that end too early, and characters of word processors."""
    lines = script.lines
    for number, line in enumerate(lines, 1):
        is_comment = line.lstrip().startswith("#")
        if re.search(r"\\[ \t]+$", line) and not is_comment:
            found = "a space follows the backslash, so that the command ends here"
            yield Finding(number, found, f"{line.split()[0]} ... \\, without a space at the end")
        is_read = line.startswith(tuple(PREFIXES.values())) or (not is_comment and re.search(_PROGRAMS, line))
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "", line if is_comment else re.sub(r"\s#.*", "", line))
        match = re.search(r"(?:^|\s)([\u2013\u2014])-?\w|(?:^|[\s=])([\u201c\u201d\u2018\u2019])", text)
        if match and is_read:
            meaning = "hyphen" if match[1] else "quote"
            found = f"{match[1] or match[2]} is a typographic character, which is not read as a {meaning}"
            yield Finding(number, found, "-" if match[1] else "\" or '")
    for command in script.commands:
        text = lines[command.line - 1].strip()
        earlier = lines[command.line - 2] if command.line > 1 else "\\"
        is_comment = earlier.lstrip().startswith("#")
        is_pattern = re.match(r"\S+\)", text)  # of `case`
        continues = earlier.rstrip().endswith("\\") and not is_comment
        if re.match(r"--?[A-Za-z]", text) and not is_pattern and not continues:
            reason = "a comment" if is_comment else "a missing backslash"
            found = f"this line begins with an option: {reason} in line {command.line - 1} has ended the command"
            yield Finding(command.line, found, "a backslash at the end of each line but the last")


def ignored_directives(script: UserScript) -> Iterator[Finding]:
    """Directives after the first command."""
    prefix = PREFIXES.get(script.scheduler, "")
    for line in sorted(
        {directive.line for directive in script.all_directives if directive.line > script.first_command}
    ):
        found = f"{prefix} after the first command (line {script.first_command}) is ignored"
        yield Finding(line, found, f"this line before line {script.first_command}")


def missing_wait(script: UserScript) -> Iterator[Finding]:
    """Training in the background of a script that ends."""
    if not script.scheduler:
        return
    started = [command for command in script.training if command.position.in_background]
    later = script.after(started[-1]) if started else []
    polls = any(other.program == "sleep" and other.position.loop for other in later)
    waits = any(other.program == "wait" or (other.trains and not other.position.in_background) for other in later)
    if started and not waits and not polls:
        found = "the script does not wait for this command: its job ends at once, and the scheduler kills the processes"
        where = "after the loop" if started[-1].position.loop else "after this line"
        yield Finding(started[-1].line, found, f"wait, {where}")


RULES = (first_line, broken_lines, ignored_directives, missing_wait)
