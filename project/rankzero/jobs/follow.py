"""Prints the state and the log of a job until it ends. Does not import torch."""

import codecs
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rankzero.distributed.timers import TIMERS
from rankzero.jobs.record import Record, State, logs_of, member_records, read_record, submitted_at
from rankzero.jobs.schedulers import job_state
from rankzero.messages import Exit, print_error, print_line, print_text
from rankzero.runs.directory import RunDirectory
from rankzero.runs.recorded_run import modified_at

LOG_SECONDS = 0.3
"""Seconds between two reads of the log."""


class LogReader:
    """Reads the new parts of the logs of a job."""

    def __init__(self, root: Path, name: str, is_array: bool, skip: bool = True) -> None:
        self.root, self.name, self.is_array = root, name, is_array
        self._files: dict[tuple[int, int], tuple[BinaryIO, codecs.IncrementalDecoder]] = {}
        if skip:
            self._open_new_files()
            for file, _ in self._files.values():
                file.seek(0, os.SEEK_END)

    def read(self) -> str:
        """Returns what was added to the logs since the last call."""
        self._open_new_files()
        text = ""
        for file, decoder in self._files.values():
            if os.fstat(file.fileno()).st_size < file.tell():  # PBS empties the file for a new job
                file.seek(0)
            text += decoder.decode(file.read())
        return text

    def close(self) -> None:
        """Closes the files."""
        for file, _ in self._files.values():
            file.close()

    def _open_new_files(self) -> None:
        """Opens logs that are not open; a renamed log stays open."""
        for path in logs_of(self.root, self.name, self.is_array):
            try:
                status = path.stat()
                key = status.st_dev, status.st_ino
                if key not in self._files:
                    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                    self._files[key] = path.open("rb"), decoder
            except OSError:
                continue


def follow(root: Path, record: Record, reader: LogReader, stop_command: str) -> int:
    """Prints the state of a job whenever it changes, and its log, until it has ended; returns the run's `Exit` code."""
    shown, next_query = "", 0.0
    try:
        while True:
            state = None
            if time.monotonic() >= next_query:
                record = read_record(root, record.name) or record
                state = job_state(record)
                next_query = time.monotonic() + TIMERS.scheduler_pause
            has_ended = state is not None and state.is_active is False
            if has_ended:
                print_text(reader.read())  # before the last state
            if state is not None and state.word != shown:
                print_line(f"rankzero: job {record.id}: {state}")
                shown = state.word
            print_text(reader.read())
            if state is not None and has_ended:
                return next(filter(None, _exit_codes(root, record, state)), Exit.FINISHED)  # the first unfinished run
            time.sleep(LOG_SECONDS)
    except KeyboardInterrupt:
        print_error(f"job {record.id} continues; to stop it: {stop_command}")
        return 130
    finally:
        reader.close()


def run_result(root: Path, record: Record, state: State) -> str:
    """Returns the result of an ended job: `run stopped`, or for a job array `of 3 runs, 2 finished, 1 failed`."""
    words = {Exit.FINISHED: "finished", Exit.STOPPED: "stopped"}
    results = Counter(words.get(Exit(code), "failed") for code in _exit_codes(root, record, state))
    if record.array is None:
        return f"run {next(iter(results))}"
    return f"of {results.total()} runs, " + ", ".join(f"{count} {word}" for word, count in results.items())


def is_finished(run: Path) -> bool:
    """Returns whether the last attempt of a run has finished it."""
    return RunDirectory(run).read("summary.json").get("status") == "finished"


def _exit_codes(root: Path, record: Record, state: State) -> list[int]:
    """Returns the exit code of the run whose job has ended; for a job array, one for each member."""
    begun = submitted_at(root, record)
    if record.array is None:
        return [_code_of(root / record.name, begun, lambda: state)]
    return [_code_of(root / member.name, begun, partial(job_state, member)) for member in member_records(record)]


def _code_of(run: Path, begun: float, query: Callable[[], State]) -> int:
    """Returns the exit code of a run, from its summary if the job has written one."""
    status = RunDirectory(run).read("summary.json").get("status")
    if modified_at(run / "summary.json") >= max(begun, modified_at(run / "run.json")):
        return {"finished": Exit.FINISHED, "stopped": Exit.STOPPED}.get(str(status), Exit.FAILED)
    has_nothing_to_do = status == "finished" and not query().has_failed  # the run had finished before
    return Exit.FINISHED if has_nothing_to_do else Exit.FAILED
