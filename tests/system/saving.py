"""Saves checkpoints in a process in which a chosen system call fails or kills the process.

Run as a program, this file imports everything and forks such a process for each request. It reads one request per
line, and prints the outcome.
"""

import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CALLS = ("openat", "mkdir", "write", "fsync", "rename", "close", "unlinkat", "rmdir")
"""System calls of a save, except those that only inspect files and therefore change nothing."""

STEPS = (1, 2, 2, None, 3)
"""Step of each save; the second save of a step replaces the first. None removes the oldest checkpoint."""

NEWEST = (None, (1, 0), (2, 1), (2, 2), (2, 2), (3, 4))
"""Step and content of the newest checkpoint, indexed by the number of finished `STEPS`."""

SIZE = 5_000


@dataclass
class Outcome:
    """Exit code of the saves, negative if a signal killed the process.

    `done` tells whether each of `STEPS` that the process has finished succeeded, and `calls` are the system calls in
    order, each with the file name of its file descriptor, if it has one.
    """

    code: int
    done: list[bool]
    calls: list[tuple[str, str]]


class Saver:
    """Saves checkpoints under strace, by requests to a process that forks for each of them."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def save(self, folder: Path, fault: str | None = None) -> Outcome:
        """Carries out `STEPS` in a folder; `fault` has the format of strace's --inject."""
        self.process.stdin.write(json.dumps([str(folder), fault]) + "\n")
        self.process.stdin.flush()
        return Outcome(**json.loads(self.process.stdout.readline()))


@contextmanager
def start_saver() -> Iterator[Saver]:
    """Starts the process that forks once per request."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, __file__], **pipes, text=True, env=environment) as process:
        yield Saver(process)
        process.stdin.close()


def _save_all(folder: Path, report: Callable[[int, bool], None]) -> None:
    import torch

    from rankzero.checkpoints.manifest import checkpoints_in
    from rankzero.checkpoints.write import remove_directory, write_directory

    for number, step in enumerate(STEPS):
        try:
            if step is None:
                remove_directory(checkpoints_in(folder)[0])
            else:
                weights = {name: torch.full((SIZE,), number) for name in "ab"}
                write_directory({"global_step": step, **weights}, folder / f"step-{step:08d}")
        except OSError:
            report(number, False)
        else:
            report(number, True)


def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder:  # imports everything before the first fork
        _save_all(Path(folder) / "checkpoints", lambda number, done: None)
    for line in sys.stdin:
        folder, fault = json.loads(line)
        print(json.dumps(_save_under_strace(Path(folder), fault)), flush=True)


def _save_under_strace(folder: Path, fault: str | None) -> dict:
    notes, ready_index = mmap.mmap(-1, len(STEPS) + 1), len(STEPS)  # a write to shared memory needs no system call
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        notes[ready_index] = 1  # strace attaches only now, and does not record the close above
        os.read(read_end, 1)
        _save_all(folder, lambda number, done: notes.__setitem__(number, 1 + done))
        os._exit(0)
    while not notes[ready_index]:
        time.sleep(0.001)
    with tempfile.NamedTemporaryFile("r") as log:
        command = ["strace", "-f", "-y", "-p", str(pid), "-o", log.name, "-e", f"trace={','.join(CALLS)}"]
        command += ["-e", f"inject={fault}"] if fault else []
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert "attached" in strace.stderr.readline()
            for descriptor in (write_end, read_end):
                os.close(descriptor)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            strace.communicate()
        calls = re.findall(r"^\d+ +(\w+)\((?:\d+<[^>]*?([^>/]*)>)?", log.read(), re.MULTILINE)
    return {"code": code, "done": [note == 2 for note in _until_zero(notes[:ready_index])], "calls": calls}


def _until_zero(notes: Sequence[int]) -> list[int]:
    return list(notes[: notes.index(0)] if 0 in notes else notes)


if __name__ == "__main__":
    # The first entry is this folder, whose modules could hide others.
    sys.path[0] = str(Path(__file__).parent.parent.parent)
    _serve()
