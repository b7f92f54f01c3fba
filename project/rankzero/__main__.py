"""Runs `python -m rankzero fit ...` and the console command `rankzero`. Does not import torch."""

import sys
from importlib import import_module
from pathlib import Path

from rankzero import __version__
from rankzero.cli.command import OTHER_SUBCOMMANDS, SUBCOMMANDS
from rankzero.distributed.process.at_exit import exit_quickly_with
from rankzero.messages import Exit, RequestError, flush_streams, nearest, print_error, print_line, set_spelling

COMMANDS = {
    "fit": "train a model, or resume its training",
    "evaluate": "compute exact metrics of a run or a checkpoint",
    "predict": "write the predictions of a run or a checkpoint, in order",
    "preflight": "check whether all processes can train together",
    "submit": "run fit as a job of a cluster, and watch, stop or resume it",
    "list": "list runs: status, progress, metric, speed",
    "report": "write the report of a run, also of one that was killed",
    "compare": "print how runs differ, and draw their curves",
    "explain": "print the detected launcher and the variables that show it; start nothing",
}


def main() -> int:
    """Runs the command named by the first argument and returns its exit code."""
    set_spelling(as_typed)
    if sys.path[0] in ("", str(Path.cwd())):  # set by `python -m`; a user's package must not hide Rankzero's
        del sys.path[0]  # rankzero.cli.user_classes appends this folder to the end
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {purpose}" for command, purpose in COMMANDS.items()]
        return _print(
            "\n".join(["rankzero COMMAND ...", "", *lines, "", "rankzero COMMAND --help lists the flags of a command"])
        )
    if name == "--version":
        return _print(__version__)
    module, flags = {"explain": ("fit", ("--explain",)), **SUBCOMMANDS}.get(name, (name, ()))
    if module not in COMMANDS:
        found = f"no such command; the commands are {', '.join(COMMANDS)}"
        instead = f"rankzero {OTHER_SUBCOMMANDS.get(name) or nearest(name, COMMANDS) or 'fit'}"
        print_error(f"cannot start\n{RequestError(f'rankzero {name}', found, instead)}")
        return Exit.WRONG_REQUEST
    return int(import_module(f"rankzero.commands.{module}").main([*flags, *arguments]))


def _print(text: str) -> int:
    print_line(text)
    flush_streams()
    return Exit.FINISHED


def as_typed(text: str) -> str:
    """Replaces `python launch/fit.py` with `rankzero fit`, and `launch/fit.py` with `-m rankzero fit`."""
    for command in COMMANDS:
        script = f"launch/{command}.py"
        text = text.replace(f"python {script}", f"rankzero {command}").replace(f'"$PWD/{script}"', script)
        text = text.replace(script, f"-m rankzero {command}")
    return text


def run() -> int:
    """Runs `main` as a program that consists of nothing else."""
    return exit_quickly_with(main())


if __name__ == "__main__":
    sys.exit(run())
