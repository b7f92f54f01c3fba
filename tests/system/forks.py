"""Runs `launch/fit.py` on several ranks that are started with RANK and WORLD_SIZE, as containers are."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import running
from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from running import LIMIT, reserved_port


def fit_on_ranks(
    *arguments: str,
    folder: Path,
    world: int = 1,
    code: int | None = 0,
    signals: Sequence[tuple[float, int, int]] = (),
    signals_after: str = "",
    script: str = "fit",
    seconds: float = LIMIT,
    kills_rest: bool = False,
) -> list[int]:
    """Runs `python launch/fit.py`; returns the exit code of each rank, negative if a signal killed the rank.

    `script` runs instead of `fit`: another command, or the path of a script. Every rank must have the exit code, unless
    that is None. `signals` are tuples of delay (seconds), signal number and rank; the appearance of the file
    `signals_after` in the folder starts the delays, otherwise the start of the ranks does. All ranks are killed after
    some seconds, and with `kills_rest` once a rank has exited.
    """
    command = ["python", script if script.endswith(".py") else running.script(script), *arguments]
    with reserved_port() as port:
        variables = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with _stop_signals_blocked():
            ranks = [_start(command, folder, rank, variables if world > 1 else {}) for rank in range(world)]
        try:
            deadline = time.monotonic() + seconds
            if signals_after:
                _wait_for_file(folder / signals_after, ranks, deadline)
            start_time = time.monotonic()
            for delay, number, rank in sorted(signals):
                time.sleep(max(0.0, start_time + delay - time.monotonic()))
                ranks[rank].send_signal(number)
            while _running(ranks) > (world - 1 if kills_rest else 0) and time.monotonic() < deadline:
                time.sleep(0.005)
        finally:
            for process in ranks:
                process.kill()
    codes = [process.wait() for process in ranks]
    if code is not None:
        assert codes == [code] * world, (codes, *outputs(folder, world))
    return codes


def outputs(folder: Path, world: int = 1) -> list[str]:
    """Returns what each rank has printed in this folder, over all runs."""
    return [(folder / f"rank-{rank}.out").read_text() for rank in range(world)]


def summary(folder: Path, run: str = "x") -> dict[str, Any]:
    """Returns the summary of a run in this folder."""
    content: dict[str, Any] = json.loads((folder / "runs" / run / "summary.json").read_text())
    return content


def _start(command: Sequence[str], folder: Path, rank: int, variables: dict[str, object]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PATH": f"{running.BIN}:{os.environ['PATH']}"}
    if variables:
        environment |= {name: str(value) for name, value in (variables | {"RANK": rank, "LOCAL_RANK": rank}).items()}
    with (folder / f"rank-{rank}.out").open("ab") as file:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Blocks stop signals in processes started meanwhile until their handlers are installed, so that none is lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _wait_for_file(file: Path, ranks: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> None:
    """Waits until a file appears or a rank exits."""
    while not file.exists() and _running(ranks) == len(ranks) and time.monotonic() < deadline:
        time.sleep(0.005)


def _running(ranks: "Sequence[subprocess.Popen[bytes]]") -> int:
    return sum(process.poll() is None for process in ranks)
