"""Prints the state and the log of a job until it ends. Does not import torch."""

import json
import time
from pathlib import Path
from typing import BinaryIO

from rankzero.commands.jobs.record import Record, logs_of, read_record, record_path
from rankzero.commands.jobs.submission import job_state
from rankzero.messages import Exit, print_error, print_line

STATE_SECONDS = 2.0
"""Time between two queries of the scheduler."""

LOG_SECONDS = 0.3
"""Time between two looks at the log."""


class LogReader:
    """Reads the new parts of the logs of a job.

    Args:
        root: Folder of the runs.
        name: Name of the run.
        is_array: Whether the job is an array, with one log per member.
        skip: Whether to skip what the logs already contain.
    """

    def __init__(self, root: Path, name: str, is_array: bool, skip: bool = True) -> None:
        self.root, self.name, self.is_array = root, name, is_array
        self._files: dict[tuple[int, int], BinaryIO] = {}
        if skip:
            self.read()

    def read(self) -> str:
        """Returns what was added to the logs since the last call."""
        text = ""
        for path in logs_of(self.root, self.name, self.is_array):
            try:
                status = path.stat()
                key = status.st_dev, status.st_ino  # PBS writes a new file for a new job
                if key not in self._files:
                    self._files[key] = path.open("rb")
            except OSError:
                continue
            text += self._files[key].read().decode(errors="replace")
        return text

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def follow(root: Path, record: Record, reader: LogReader) -> int:
    """Prints the state of a job whenever it changes, and its log, until the job has ended.

    Args:
        root: Folder of the runs.
        record: The job.
        reader: Reads the log.

    Returns:
        The exit code of the run: that of `fit`, see `rankzero.messages.Exit`.
    """
    shown, next_query = "", 0.0
    try:
        while True:
            is_active: bool | None = True
            if time.monotonic() >= next_query:
                record = read_record(root, record.name) or record
                state = job_state(record)
                is_active, word = state.is_active, state.text.split(",")[0]
                if word != shown:
                    print_line(f"rankzero: job {record.id}: {state.text}")
                    shown = word
                next_query = time.monotonic() + STATE_SECONDS
            if text := reader.read():
                print(text, end="", flush=True)
            if is_active is False:
                return _exit_code(root, record)
            time.sleep(LOG_SECONDS)
    except KeyboardInterrupt:
        print_error(f"job {record.id} continues; to stop it: python launch/submit.py stop {record.name}")
        return 130
    finally:
        reader.close()


def _exit_code(root: Path, record: Record) -> int:
    """Returns the exit code of a run whose job has ended, from its summary; 1 if the run wrote none.

    For a job array, it is the code of the first member that has not finished.
    """
    folders = [root / record.name] if record.array is None else sorted(root.glob(f"{record.name}-*/"))
    codes = [_code_of(folder / "summary.json", record_path(root, record.name)) for folder in folders]
    return next(filter(None, codes), Exit.FINISHED if codes else Exit.FAILED)


def _code_of(summary: Path, record: Path) -> int:
    try:
        status = json.loads(summary.read_text())["status"]
        is_new = summary.stat().st_mtime >= record.stat().st_mtime
    except (OSError, ValueError, KeyError):
        return Exit.FAILED
    if status == "finished":  # also if the run had finished before
        return Exit.FINISHED
    return Exit.STOPPED if status == "stopped" and is_new else Exit.FAILED
