"""Checks a user's own job script. Does not import torch."""

import re
import subprocess
from pathlib import Path

from rankzero.commands.jobs.check.finding import Finding
from rankzero.commands.jobs.check.rules import (
    accelerate,
    addresses,
    pbs,
    shell,
    slurm_launch,
    slurm_options,
    torchrun,
    variables,
)
from rankzero.commands.jobs.check.user_script import UserScript
from rankzero.messages import RequestError, printable_line

_COMMON = (*shell.RULES, *variables.RULES, *addresses.RULES, *torchrun.RULES, *accelerate.RULES)
_OF_SCHEDULERS = {"slurm": (*slurm_launch.RULES, *slurm_options.RULES), "pbs": pbs.RULES, "": ()}

MAX_CHARACTERS = 100_000
"""Longer files are refused: they are not job scripts."""


def check(text: str) -> list[Finding]:
    """Returns the findings in a script, in the order of its lines."""
    script = UserScript(text.removeprefix(shell.BYTE_ORDER_MARK).replace("\r\n", "\n"))
    findings = [*shell.encoding(text)]
    broken = [*shell.broken_lines(script)]
    for rule in (*_COMMON, *_OF_SCHEDULERS[script.scheduler]):
        findings += rule(script)
    if broken:  # findings in commands are a consequence
        started = {command.line for command in script.training}
        findings = [item for item in findings if item in broken or item.line not in started]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.line)


def read_script(path: str) -> str:
    """Reads a script.

    Raises:
        RequestError: The file cannot be read, is not a script of a shell, or bash finds an error in its syntax.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(4 * MAX_CHARACTERS + 1)
    except OSError as error:
        raise RequestError(f"--check {path}", f"cannot read this file: {error.strerror}", "--check FILE") from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if len(text) > MAX_CHARACTERS or "\0" in text:
        reason = "contains a NUL byte" if "\0" in text else f"has more than {MAX_CHARACTERS:,} characters"
        raise RequestError(f"--check {path}", f"not a job script: it {reason}", "--check FILE")
    interpreter = text.splitlines()[0] if text.startswith("#!") else "#!/bin/bash"
    if not re.search(r"(^|[/ ])(ba|da|k)?sh( |$)", interpreter):
        found = f"only scripts of bash or sh can be checked, not {interpreter}"
        raise RequestError(f"--check {path}", found, "--check FILE, with a script of bash")
    syntax = subprocess.run(
        ["bash", "-O", "extglob", "-n"],
        input=text.replace("\r\n", "\n"),
        capture_output=True,
        text=True,
        errors="replace",
    )
    if syntax.returncode:
        lines = syntax.stderr.strip().splitlines() or [f"exit code {syntax.returncode}"]
        found = f"bash finds an error: {lines[0].removeprefix('bash: ')}"
        raise RequestError(f"--check {path}", found, "the corrected line")
    try:
        script = UserScript(text)
        has_content = script.scheduler or script.training or any(command.launchers for command in script.commands)
    except RecursionError:
        raise RequestError(f"--check {path}", "its commands are nested too deeply", "--check FILE") from None
    if not has_content:
        found = "neither #SBATCH, #PBS nor a command that trains was found: nothing was checked"
        raise RequestError(f"--check {path}", found, "--check FILE, with the script that starts training")
    return text


def report(path: str, findings: list[Finding]) -> str:
    """Returns the findings as text: what was found in each line, and what to write instead."""
    if not findings:
        return f"{path}: nothing wrong was found"
    lines = [
        f"{path}:{item.line}: {printable_line(item.found)}\n  write  {printable_line(item.instead)}"
        for item in findings
    ]
    return "\n".join(lines)
