"""Checks a user's own job script. Does not import torch."""

import re
import subprocess
from pathlib import Path

from rankzero.jobs.check import launchers, lines, variables
from rankzero.jobs.check.script import Finding, Script
from rankzero.messages import RequestError, printable_line


def check(text: str) -> list[Finding]:
    """Returns the findings in a script, in the order of its lines."""
    script = Script(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    findings: list[Finding] = []
    if script.scheduler == "slurm" and not text.startswith("#!"):
        mark = " (a byte order mark precedes it)" if text.startswith("\ufeff") else ""
        findings.append((1, f"sbatch refuses a script that does not begin with #!{mark}", "#!/bin/bash"))
    if "\r\n" in text:
        found = "lines end with CR LF, as on Windows: sbatch refuses them, and bash adds the CR to the last word"
        findings.append((text[: text.index("\r\n")].count("\n") + 1, found, "sed -i 's/\\r$//' FILE"))
    broken = [*lines.broken_lines(script)]
    started = {command.line for command in script.training} if broken else ()  # their findings are a consequence
    for rule in (*lines.RULES, *launchers.RULES, *variables.RULES):
        findings += [finding for finding in rule(script) if finding in broken or finding[0] not in started]
    return sorted((line, printable_line(found), printable_line(instead)) for line, found, instead in {*findings})


def read_script(path: str) -> str:
    """Reads a script.

    Raises:
        RequestError: The file cannot be read, is not a script of a shell, or bash finds an error in its syntax.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(100_001).decode(errors="replace")
    except OSError as error:
        raise RequestError(f"--check {path}", f"cannot read this file: {error.strerror}", "--check FILE") from None
    source = text.replace("\r\n", "\n").encode()
    syntax = subprocess.run(["bash", "-O", "extglob", "-n"], input=source, capture_output=True)
    found, script = "", Script(text)
    if len(source) > 100_000 or "\0" in text:
        found = "not a job script: it contains a NUL byte or more than 100,000 bytes"
    elif re.match(r"#!(?!.*[/ ](ba|da|k)?sh(\s|$))", text):
        found = f"only scripts of bash or sh can be checked, not {text.splitlines()[0]}"
    elif syntax.returncode:
        reason = syntax.stderr.decode(errors="replace").partition("\n")[0]
        found = f"bash finds an error: {reason.removeprefix('bash: ')}"
    elif not script.scheduler and not any(command.trains or command.launchers for command in script.commands):
        found = "neither #SBATCH, #PBS nor a command that trains was found: nothing was checked"
    if found:
        raise RequestError(f"--check {path}", found, "--check FILE, with a script of bash that starts training")
    return text


def report(path: str, findings: list[Finding]) -> str:
    """Returns the findings as text: what was found in each line, and what to write instead."""
    rows = [f"{path}:{line}: {found}\n  write  {instead}" for line, found, instead in findings]
    return "\n".join(rows) or f"{path}: nothing wrong was found"
