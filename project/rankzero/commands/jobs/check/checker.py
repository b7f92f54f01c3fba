"""Checks a user's own job script. Does not import torch."""

import re
import subprocess
from pathlib import Path

from rankzero.commands.jobs.check.finding import WRONG, Finding
from rankzero.commands.jobs.check.rules import (
    accelerate,
    mpirun,
    pbs,
    shell,
    slurm_launch,
    slurm_options,
    torchrun,
    variables,
)
from rankzero.commands.jobs.check.user_script import UserScript
from rankzero.messages import RequestError

_COMMON = (*shell.RULES, *variables.RULES, *torchrun.RULES, *accelerate.RULES, *mpirun.RULES)
_OF_SCHEDULERS = {"slurm": (*slurm_launch.RULES, *slurm_options.RULES), "pbs": pbs.RULES, "": ()}

MAX_CHARACTERS = 1_000_000
"""Length from which on a file is no job script."""


def check(text: str) -> list[Finding]:
    """Returns the findings in a script, in the order of its lines."""
    script = UserScript(text.removeprefix(shell.BYTE_ORDER_MARK).replace("\r\n", "\n"))
    findings = [*shell.encoding(text)]
    for rule in (*_COMMON, *_OF_SCHEDULERS[script.scheduler]):
        findings += rule(script)
    return sorted(dict.fromkeys(findings), key=lambda finding: (finding.line, finding.level != WRONG))


def read_script(path: str) -> str:
    """Reads a script.

    Raises:
        RequestError: The file cannot be read, is not a script of a shell, or bash finds an error in its syntax.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise RequestError(f"--check {path}", f"cannot read this file: {reason}", "--check FILE") from None
    if len(text) > MAX_CHARACTERS or "\0" in text:
        raise RequestError(f"--check {path}", "not a job script", "--check FILE")
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
        reason = syntax.stderr.strip().splitlines()[0].removeprefix("bash: ")
        raise RequestError(f"--check {path}", f"bash finds an error: {reason}", "the corrected line")
    return text


def report(path: str, findings: list[Finding]) -> str:
    """Returns the findings as text: what was found in each line, and what to write instead."""
    if not findings:
        return f"{path}: nothing wrong or risky was found"
    wrong = sum(finding.level == WRONG for finding in findings)
    lines = [f"{path}:{item.line}: {item.level}: {item.found}\n  write  {item.instead}" for item in findings]
    return "\n".join([*lines, f"{wrong} wrong, {len(findings) - wrong} risky"])
