"""Commands that a user may type after a run. Does not import torch."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.messages import spelled
from rankzero.runs.directory import RunDirectory
from rankzero.runs.reports.secrets import HIDDEN, command_without_secrets

_NAME_FLAGS = ("--name", "--run", "--run_name")


class NextCommand(NamedTuple):
    """A command for the user.

    Args:
        purpose: What the command does.
        command: The command line; empty if it is not recorded.
    """

    purpose: str
    command: str = ""


def next_commands(
    run: RunDirectory, summary: Mapping[str, Any], environment: Mapping[str, Any], has_curves: bool
) -> list[NextCommand]:
    """Returns the commands that resume or evaluate a run, and show its curves.

    Args:
        run: Directory of the run.
        summary: Summary of the run.
        environment: Result of `describe_environment`, or {} if it is unknown.
        has_curves: Whether the run has TensorBoard files.
    """
    root = [] if str(run.path.parent) == "runs" else ["--root", str(run.path.parent)]
    name = ["--name", run.name]
    commands = []
    if summary.get("status") != "finished":
        commands.append(_resume(run, environment, root, has_checkpoint=bool(summary.get("checkpoint"))))
    elif environment and not environment.get("is_script") and _can_evaluate(summary):
        evaluate = f"{_evaluate(environment)} {shlex.join([*name, *root])}"
        commands.append(NextCommand("Evaluate the newest checkpoint", evaluate))
    if has_curves:
        command = ["tensorboard", "--logdir", str(run.path.parent), "--host", "localhost"]
        commands.append(NextCommand("Show all curves", shlex.join(command)))
    return commands


def _can_evaluate(summary: Mapping[str, Any]) -> bool:
    return bool(summary.get("checkpoint")) and summary["can_validate"]


def launch_line(environment: Mapping[str, Any]) -> str:
    """Returns the command line of each process of an attempt, without secrets; empty if it is unknown."""
    return shlex.join(command_without_secrets(environment.get("command") or []))


def _evaluate(environment: Mapping[str, Any]) -> str:
    """Returns the beginning of the command that evaluates, with the interpreter and the folder of the run's command."""
    words = environment.get("command") or []
    for number, word in enumerate(words):
        if Path(word).name == "fit.py":
            return shlex.join([*words[:number], str(Path(word).with_name("evaluate.py"))])
    return spelled("python launch/evaluate.py")


def _resume(
    run: RunDirectory, environment: Mapping[str, Any], root: Sequence[str], has_checkpoint: bool
) -> NextCommand:
    purpose = "Resume" if has_checkpoint else "Start again"
    if (run.path.parent / f"{run.name}.job.sh").is_file():
        return NextCommand(purpose, f"{spelled('python launch/submit.py')} {shlex.join(['resume', run.name, *root])}")
    same_command = spelled(f"the same command with --name {run.name}")
    tokens = command_without_secrets(environment.get("command") or [])
    if has_checkpoint:
        tokens = _without_resume(tokens)
    if not tokens:
        return NextCommand(f"{purpose}: {same_command}")
    if environment.get("is_script"):
        purpose += f": {same_command}"
    elif not any(token.partition("=")[0] in _NAME_FLAGS for token in tokens):
        tokens += ["--name", run.name]
    if any(HIDDEN in token for token in tokens):
        purpose += f", with the secret values in place of {HIDDEN}"
    if environment.get("launcher") != "local":
        purpose += f", with the launch line of {environment.get('launcher')}; each process runs"
    return NextCommand(purpose, shlex.join(tokens))


def _without_resume(tokens: Sequence[str]) -> list[str]:
    """Returns a command line without `--resume`: `--resume never` would start the run from the beginning again."""
    kept: list[str] = []
    previous = ""
    for token in tokens:
        if token.partition("=")[0] not in ("--resume", "--ckpt_path") and previous not in ("--resume", "--ckpt_path"):
            kept.append(token)
        previous = token
    return kept
