"""Rules about the script as a shell program: its first line, ignored directives, lost exit codes, set-up lines."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.directives import PREFIXES
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.user_script import UserScript


def first_line(script: UserScript) -> Iterator[Finding]:
    """Slurm refuses a script without an interpreter."""
    if script.scheduler == "slurm" and not script.text.startswith("#!"):
        yield Finding(1, WRONG, "sbatch refuses a script whose first line is not #!", "#!/bin/bash")


def line_ends(script: UserScript) -> Iterator[Finding]:
    """Lines that end as on Windows."""
    line = next((number for number, line in enumerate(script.text.split("\n"), 1) if line.endswith("\r")), None)
    if line:
        found = "lines end with CR LF, as on Windows: sbatch refuses them, and bash adds the CR to the last word"
        yield Finding(line, WRONG, found, "sed -i 's/\\r$//' FILE")


def ignored_directives(script: UserScript) -> Iterator[Finding]:
    """Directives after the first command, and comments that look like directives."""
    prefix = PREFIXES.get(script.scheduler, "")
    for line in sorted(
        {directive.line for directive in script.all_directives if directive.line > script.first_command}
    ):
        found = f"{prefix} after the first command (line {script.first_command}) is ignored"
        yield Finding(line, WRONG, found, f"this line before line {script.first_command}")
    for number, text in enumerate(script.lines[: script.first_command - 1], 1):
        if match := re.match(r"\s*#\s*(SBATCH|PBS)\s+-", text, re.IGNORECASE):
            word = match[1].upper()
            if f"#{word}" in PREFIXES.values() and not text.startswith(f"#{word}"):
                options = text[match.end() - 1 :].strip()
                yield Finding(
                    number, RISKY, f"this is a comment: only #{word} begins a directive", f"#{word} {options}"
                )


def lost_exit_code(script: UserScript) -> Iterator[Finding]:
    """A failed training that the scheduler counts as a success."""
    exits_on_error = any(
        command.program == "set" and re.search(r"-\w*e|errexit", command.text) for command in script.commands
    ) or re.match(r"#!\S+ +-\w*e", script.text)
    has_pipefail = "pipefail" in script.text
    for command in script.training:
        if command.handled or command.in_background or command.in_function:
            continue
        if command.piped and not has_pipefail and "PIPESTATUS" not in script.text:
            found = "the exit code of this line is that of its last command: failed training counts as a success"
            yield Finding(command.line, RISKY, found, "set -o pipefail, before this line")
        later = [other for other in script.after(command) if other.line > command.line]
        reads_code = any("$?" in other.text or other.program in ("exit", "return") for other in later)
        if later and not (exits_on_error or reads_code or command.piped or any(other.trains for other in later)):
            found = f"the exit code of the job is that of line {later[-1].line}: failed training counts as a success"
            yield Finding(command.line, RISKY, found, "set -e, before the first command")


def missing_wait(script: UserScript) -> Iterator[Finding]:
    """Training in the background of a script that ends."""
    started = [command for command in script.training if command.in_background]
    if started and not any(command.program == "wait" for command in script.after(started[-1])):
        found = "the script does not wait for this command: its job ends at once, and the scheduler kills the processes"
        yield Finding(started[-1].line, WRONG, found, "wait, after this line")


def conda_activation(script: UserScript) -> Iterator[Finding]:
    """`conda activate` in a shell that has not loaded conda's functions."""
    if re.match(r"#!.*bash.* -\w*[li]", script.text):
        return
    for command in script.commands:
        words = [word.text for word in command.words]
        if words[:2] in (["conda", "activate"], ["mamba", "activate"]):
            is_loaded = any(
                "conda.sh" in other.text
                or "shell.bash hook" in other.text
                or "bashrc" in other.text
                or (other.program == "module")
                for other in script.before(command)
            )
            if not is_loaded:
                found = f"`{words[0]} activate` fails in a batch script, which does not read ~/.bashrc"
                instead = f'source "$(conda info --base)/etc/profile.d/conda.sh" && {command.text}'
                yield Finding(command.line, RISKY, found, instead)
            return


def visible_devices(script: UserScript) -> Iterator[Finding]:
    """GPUs that are chosen by the script instead of the scheduler."""
    for command in script.commands:
        value = command.assignments.get("CUDA_VISIBLE_DEVICES")
        if script.scheduler and value and re.fullmatch(r"[0-9][0-9,]*", value.text):
            found = f"CUDA_VISIBLE_DEVICES={value.text} replaces the GPUs that the scheduler has chosen for the job"
            yield Finding(command.line, RISKY, found, "leave CUDA_VISIBLE_DEVICES out")


RULES = (
    first_line,
    line_ends,
    ignored_directives,
    lost_exit_code,
    missing_wait,
    conda_activation,
    visible_devices,
)
