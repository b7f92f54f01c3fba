"""Rules about the script as a shell program: its first line, ignored directives, lost exit codes, set-up lines."""

import re
from collections.abc import Iterator

from rankzero.commands.jobs.check.directives import PREFIXES
from rankzero.commands.jobs.check.finding import RISKY, WRONG, Finding
from rankzero.commands.jobs.check.user_script import UserScript

_PROGRAMS = r"\b(srun|torchrun|mpirun|mpiexec|pbsdsh|accelerate|deepspeed|python[0-9.]*)\b"

BYTE_ORDER_MARK = "\ufeff"


def first_line(script: UserScript) -> Iterator[Finding]:
    """Slurm refuses a script without an interpreter."""
    if script.scheduler == "slurm" and not script.text.startswith("#!"):
        yield Finding(1, WRONG, "sbatch refuses a script whose first line is not #!", "#!/bin/bash")


def encoding(text: str) -> Iterator[Finding]:
    """Reports a byte order mark and line ends of Windows."""
    if text.startswith(BYTE_ORDER_MARK):
        found = "the file begins with a byte order mark, so that its first line does not begin with #!"
        yield Finding(1, WRONG, found, "save the file as UTF-8 without a byte order mark")
    line = next((number for number, line in enumerate(text.split("\n"), 1) if line.endswith("\r")), None)
    if line:
        found = "lines end with CR LF, as on Windows: sbatch refuses them, and bash adds the CR to the last word"
        yield Finding(line, WRONG, found, "sed -i 's/\\r$//' FILE")


def broken_lines(script: UserScript) -> Iterator[Finding]:
    """Continued commands that end too early, and characters of word processors."""
    lines = script.lines
    for number, line in enumerate(lines, 1):
        is_comment = line.lstrip().startswith("#")
        if re.search(r"\\[ \t]+$", line) and not is_comment:
            found = "a space follows the backslash, so that the command ends here"
            yield Finding(number, WRONG, found, f"{line.split()[0]} ... \\, without a space at the end")
        is_read = line.startswith(tuple(PREFIXES.values())) or (not is_comment and re.search(_PROGRAMS, line))
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "", line if is_comment else re.sub(r"\s#.*", "", line))
        match = re.search(r"(?:^|\s)([\u2013\u2014])-?\w|(?:^|[\s=])([\u201c\u201d\u2018\u2019])", text)
        if match and is_read:
            meaning = "hyphen" if match[1] else "quote"
            found = f"{match[1] or match[2]} is a typographic character, which is not read as a {meaning}"
            yield Finding(number, WRONG, found, "-" if match[1] else "\" or '")
    for command in script.commands:
        text = lines[command.line - 1].strip()
        earlier = lines[command.line - 2] if command.line > 1 else "\\"
        is_comment = earlier.lstrip().startswith("#")
        is_pattern = re.match(r"\S+\)", text)  # of `case`
        continues = earlier.rstrip().endswith("\\") and not is_comment
        if re.match(r"--?[A-Za-z]", text) and not is_pattern and not continues:
            reason = "a comment" if is_comment else "a missing backslash"
            found = f"this line begins with an option: {reason} in line {command.line - 1} has ended the command"
            yield Finding(command.line, WRONG, found, "a backslash at the end of each line but the last")


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
            if not text.startswith(f"#{word}"):
                options = text[match.end() - 1 :].strip()
                found = f"this is a comment: a directive is a line that begins with #{word}"
                yield Finding(number, RISKY, found, f"#{word} {options}")


def lost_exit_code(script: UserScript) -> Iterator[Finding]:
    """A failed training that the scheduler counts as a success."""
    if not script.scheduler:
        return
    exits_on_error = any(
        command.program == "set" and re.search(r"-\w*e|errexit", command.text) for command in script.commands
    ) or re.match(r"#!\S+ +-\w*e", script.text)
    has_pipefail = "pipefail" in script.code
    for command in script.training:
        if command.position.handled or command.position.in_background or command.position.in_function:
            continue
        if command.position.piped and not has_pipefail and "PIPESTATUS" not in script.code:
            found = "this line ends with the exit code of its last command: failed training counts as a success"
            yield Finding(command.line, RISKY, found, "set -o pipefail, before this line")
        later = [other for other in script.after(command) if other.line > command.line]
        reads_code = any("$?" in line.partition(" #")[0] for line in script.lines[command.line - 1 :])
        reads_code = reads_code or any(
            other.program in ("exit", "return") and [word.text for word in other.words[1:]] != ["0"] for other in later
        )
        is_last = not later or any(other.trains for other in later)
        if not (is_last or exits_on_error or reads_code or command.position.piped):
            found = f"the job ends with the exit code of line {later[-1].line}: failed training counts as a success"
            yield Finding(command.line, RISKY, found, "set -e, before the first command")


def lost_background_codes(script: UserScript) -> Iterator[Finding]:
    """Training in the background whose exit code is not read."""
    started = [command for command in script.training if command.position.in_background]
    if not started or not script.scheduler:
        return
    later = script.after(started[-1])
    waits = [other for other in later if other.program == "wait"]
    reads_code = any("$?" in line.partition(" #")[0] for line in script.lines[started[-1].line :])
    if waits and all(len(other.words) == 1 for other in waits) and not reads_code and later[-1].program == "wait":
        found = "wait without arguments returns 0, so that failed training counts as a success"
        yield Finding(waits[-1].line, RISKY, found, 'pids+=($!) after each command, and wait "$pid" for each')


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
        yield Finding(started[-1].line, WRONG, found, f"wait, {where}")


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
                or "bin/activate" in other.text
                or other.program in ("module", "ml")
                for other in script.before(command)
            )
            if not is_loaded:
                found = f"`{words[0]} activate` fails in a batch script, which does not read ~/.bashrc"
                instead = f"source /path/to/conda/etc/profile.d/conda.sh && {command.text}"
                yield Finding(command.line, RISKY, found, instead)
            return


def visible_devices(script: UserScript) -> Iterator[Finding]:
    """GPUs that are chosen by the script instead of the scheduler."""
    for command in script.commands:
        value = command.assignments.get("CUDA_VISIBLE_DEVICES")
        is_fixed = value and not command.words and re.fullmatch(r"[0-9][0-9,]*", value.text)
        if script.scheduler and value and is_fixed and not script.is_exclusive:
            found = f"CUDA_VISIBLE_DEVICES={value.text} replaces the GPUs that the scheduler has chosen for the job"
            yield Finding(command.line, RISKY, found, "leave CUDA_VISIBLE_DEVICES out")


RULES = (
    first_line,
    broken_lines,
    ignored_directives,
    lost_exit_code,
    lost_background_codes,
    missing_wait,
    conda_activation,
    visible_devices,
)
