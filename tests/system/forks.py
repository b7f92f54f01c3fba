"""Runs `launch/fit.py` many times but imports everything only once: each rank is a fork of one process.

Run as a program, this file is that process. It reads one request per line, and prints the exit codes of all ranks.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Forks:
    """Runs commands on ranks that are started with RANK and WORLD_SIZE, as containers are.

    Args:
        process: The process that forks the ranks.
    """

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def fit(
        self,
        *arguments: str,
        folder: Path,
        world: int = 1,
        code: int | None = 0,
        signals: Sequence[tuple[float, int, int]] = (),
        signals_after: str = "",
        script: str = "fit",
        seconds: float = 120,
    ) -> list[int]:
        """Runs `python launch/fit.py`; returns the exit code of each rank, negative if a signal killed the rank.

        Args:
            arguments: Command-line arguments.
            script: Runs instead of `fit`: another command, or the path of a script.
            seconds: Time limit, after which all ranks are killed.
            folder: Working directory.
            world: Number of ranks.
            code: Exit code that every rank must have; None allows any.
            signals: Tuples of delay (seconds), signal number and rank.
            signals_after: File whose appearance in the folder starts the delays; otherwise the start of the ranks does.
        """
        request = {"script": script, "arguments": arguments, "folder": str(folder), "world": world}
        request |= {"signals": sorted(signals), "signals_after": signals_after, "seconds": seconds}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        if code is not None:
            assert codes == [code] * world, (codes, *self.outputs(folder, world))
        return codes

    @staticmethod
    def outputs(folder: Path, world: int = 1) -> list[str]:
        """Returns what each rank has printed in this folder, over all runs."""
        return [(folder / f"rank-{rank}.out").read_text() for rank in range(world)]


@contextmanager
def start_forks() -> Iterator[Forks]:
    """Starts the process that forks the ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Forks(process)
        process.stdin.close()


def _serve() -> None:
    import tensorboard.compat.proto  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import rankzero.commands.implementations.prediction
    import rankzero.commands.implementations.training  # noqa: F401
    from running import reserved_port

    del os.environ["PYTHONPATH"]  # processes started by ranks must import rankzero, and not tests/rankzero
    for line in sys.stdin:
        request = json.loads(line)
        with reserved_port() as port:
            ranks = [
                _fork(request["script"], request["arguments"], Path(request["folder"]), rank, request["world"], port)
                for rank in range(request["world"])
            ]
            start_time = signals_start_time = time.monotonic()
            if request["signals_after"]:
                _wait_for_file(Path(request["folder"]) / request["signals_after"], ranks)
                signals_start_time = time.monotonic()
            for seconds, number, rank in request["signals"]:
                time.sleep(max(0.0, signals_start_time + seconds - time.monotonic()))
                os.kill(ranks[rank], number)  # its exit code has not been read, so the process ID is still valid
            codes = _exit_codes(ranks, start_time + request["seconds"])
        print(json.dumps(codes), flush=True)


def _wait_for_file(file: Path, ranks: Sequence[int]) -> None:
    """Waits until a file appears or a rank exits, whose exit code can still be read."""
    while not file.exists() and not any(
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks
    ):
        time.sleep(0.005)


def _exit_codes(ranks: Sequence[int], deadline: float) -> list[int]:
    """Waits for all ranks; kills them after the deadline, so that later requests do not have to wait."""
    codes: dict[int, int] = {}
    while running := [pid for pid in ranks if pid not in codes]:
        for pid in running:
            finished_pid, status = os.waitpid(pid, os.WNOHANG)
            if finished_pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in ranks]


def _fork(*request: Any) -> int:
    """Forks a process for a rank, and blocks stop signals until its handlers are installed, so that none is lost."""
    from rankzero.distributed.process.stop_signals import STOP_SIGNALS

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return pid
    _run(*request)
    raise AssertionError("a rank ends with its work")


def _run(script_name: str, arguments: Sequence[str], folder: Path, rank: int, world: int, port: int) -> None:
    code = 1
    try:
        os.chdir(folder)
        output_file = os.open(f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null_file = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null_file), (1, output_file), (2, output_file)):
            os.dup2(source, target)
        if world > 1:
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()})
        from rankzero.commands.start import start
        from rankzero.distributed.process.stop_signals import SIGNALS, STOP_SIGNALS
        from running import command_of, script

        SIGNALS.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if script_name.endswith(".py"):
            code = _run_script(script_name, arguments)
            return
        sys.argv = [script(script_name), *arguments]
        work = importlib.import_module(
            {
                "fit": "rankzero.commands.implementations.training",
                "evaluate": "rankzero.commands.implementations.evaluation",
                "predict": "rankzero.commands.implementations.prediction",
            }[script_name]
        )
        code = start(command_of(script_name), getattr(work, script_name), arguments)
    except SystemExit as error:  # commands that only print raise it
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_script(script: str, arguments: Sequence[str]) -> int:
    """Runs a script as `python script` does, including exit functions; returns its exit code."""
    from rankzero.distributed.process.stop_signals import SIGNALS

    SIGNALS.close()  # in a script, the handlers are installed only during training
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as error:
            code = int(error.code or 0)
    atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    repository = Path(__file__).parents[2]
    # The first entry is this folder, whose modules could hide others.
    sys.path[:1] = [str(repository), str(repository / "project")]
    _serve()
