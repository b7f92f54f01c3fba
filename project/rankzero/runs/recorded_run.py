"""What the files of a run record about the run, and its status by these files and its lock. Does not import torch."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rankzero.checkpoints.manifest import checkpoints_in, step_of
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import Peer
from rankzero.runs.lock import Owner, current_owner, last_heartbeat, lock_path
from rankzero.runs.metrics_file import newest_rows
from rankzero.text import age, is_measurement, nan_for_none

RUN_FILE, SUMMARY_FILE, CONFIG_FILE = "run.json", "summary.json", "config.yaml"

# Settings are searched in the text of the configuration, because parsing YAML takes milliseconds per run.
_KEEP_BEST = re.compile(r"""^ *keep_best: *['"]?(min|max):([^\s'"]+)['"]? *$""", re.MULTILINE)
_MAX_EPOCHS = re.compile(r"^ *max_epochs: *([0-9]{1,15}) *$", re.MULTILINE)


@dataclass(frozen=True)
class RecordedRun:
    """A run, as `run.json`, `summary.json` and the newest `config.yaml` record it; missing and damaged files are empty.

    `problem` states why a file cannot be read; it is empty if all can be.
    """

    path: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def is_archived(self) -> bool:
        """Whether `--resume never` has archived the run."""
        return re.fullmatch(r".+\.before-[0-9]+", self.name) is not None

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The records of all attempts."""
        return self.record.get("attempts") or []

    @property
    def newest(self) -> Mapping[str, Any]:
        """The record of the newest attempt; empty before the first."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def starts(self) -> list[float]:
        """Start of each attempt in seconds since 1970, as far as they are known."""
        return [_seconds_since_1970(entry["started"]) for entry in self.attempts if entry.get("started")]

    @property
    def started(self) -> float | None:
        """Start of the newest attempt in seconds since 1970; None if unknown."""
        text = self.newest.get("started") or self.record.get("created")
        return _seconds_since_1970(text) if text else None

    @property
    def has_newest_summary(self) -> bool:
        """Whether the newest attempt has written its summary."""
        return bool(self.summary.get("status")) and (self.summary.get("attempts") or 0) >= len(self.attempts)

    @property
    def max_epochs(self) -> int | None:
        """Number of requested epochs; None without a limit."""
        limit = _MAX_EPOCHS.search(self.config)
        max_epochs: int | None = self.summary.get("max_epochs", int(limit[1]) if limit else None)
        return None if max_epochs == -1 else max_epochs

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the summary; NaN for a value that is not finite."""
        return nan_for_none(self.summary.get("metrics") or {})

    @property
    def kept_best(self) -> tuple[str, str] | None:
        """`min` or `max` and the metric of `--keep_best`; None without the flag."""
        kept = _KEEP_BEST.search(self.config)
        return (kept[1], kept[2]) if kept else None


def read_run(path: Path) -> RecordedRun:
    """Reads the files of a run."""
    problems: list[str] = []
    record, summary = _read_object(path / RUN_FILE, problems), _read_object(path / SUMMARY_FILE, problems)
    config = ""
    with suppress(OSError):
        config = (path / CONFIG_FILE).read_text(errors="replace")
    return RecordedRun(path, record, summary, config, "; ".join(problems))


def saved_steps(run: RecordedRun) -> int | None:
    """Returns the step of the run's newest checkpoint; None without one."""
    try:
        checkpoints = checkpoints_in(run.path / "checkpoints")
    except OSError:
        return None
    return step_of(checkpoints[-1]) if checkpoints else None


def is_run(path: Path) -> bool:
    """Returns whether a path is the directory of a run. An unreadable directory counts as one."""
    try:
        (path / RUN_FILE).lstat()
    except PermissionError:
        return os.path.isdir(path)  # noqa: PTH112 - `Path.is_dir` raises PermissionError
    except (OSError, ValueError):  # a name with a null character
        return False
    return True


def _read_object(file: Path, problems: list[str]) -> dict[str, Any]:
    """Reads a JSON object; if the file cannot be read, returns {} and appends the reason, unless it is missing."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        problems.append(f"{file.name} is damaged")
        return {}
    return content


def modified_at(path: Path) -> float:
    """Returns when a file was modified, in seconds since 1970; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _seconds_since_1970(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def with_live_values(run: RecordedRun) -> RecordedRun:
    """Returns the run with the values that it has logged last, if its newest attempt has no summary yet."""
    if run.has_newest_summary:
        return run
    rows = newest_rows(run.path)
    steps = [row.step + 1 for row in rows]  # values of the n-th step are logged at n - 1
    logged = {tag: number for row in rows for tag, number in row.values.items()}
    live = {
        "epochs": max((int(row.epoch) for row in rows if row.epoch is not None), default=None),
        "samples": max((row.samples for row in rows if row.samples is not None), default=None),
        "steps": max([*steps, saved_steps(run) or 0], default=None) or None,
        "samples_per_second": logged.get("train/samples_per_second"),
        "metrics": run.metrics | {tag: number for tag, number in logged.items() if not is_measurement(tag)},
    }
    known = {name: value for name, value in live.items() if value is not None}
    return replace(run, summary={**run.summary, **known})


STATUS_WORDS = ("running", "waiting", "finished", "stopped", "failed", "killed", "unknown")
RUNNING, WAITING, FINISHED, STOPPED, FAILED, KILLED, UNKNOWN = STATUS_WORDS


@dataclass(frozen=True)
class Status:
    """Status of a run."""

    word: str
    note: str = ""


def status_of(run: RecordedRun, now: float | None = None) -> Status:
    """Returns the status of a run, as far as it can be known on this host.

    An attempt without a summary is running if the owner of the run's lock is alive. A process on this host can be
    inspected. A process on another host counts as running if its last heartbeat is recent; otherwise it was killed, it
    is suspended, or the clocks of the hosts differ.
    """
    now = time.time() if now is None else now
    owner, file = current_owner(lock_path(run.path))
    if owner is not None:
        on_this_host = owner.pid > 0 and owner.is_on_host_of(Peer.this(Launch()))
        status = _on_this_host(owner) if on_this_host else _on_another_host(owner, file, now)
        if status.word == RUNNING or not run.has_newest_summary:
            return status
    if run.has_newest_summary:
        return Status(run.summary["status"], run.problem or run.summary.get("problem") or "")
    if run.problem:
        return Status(UNKNOWN, run.problem)
    if not run.attempts:
        return Status(UNKNOWN, "no attempt is recorded")
    host = f" on {run.newest['host']}" if run.newest.get("host") else ""
    return Status(UNKNOWN, f"attempt {len(run.attempts)}{host} has neither a lock nor a summary")


def _on_this_host(owner: Owner) -> Status:
    if owner.process is None:
        return Status(KILLED, f"process {owner.pid} on {owner.host} has ended without a summary")
    if owner.process == "T":
        return Status(RUNNING, f"process {owner.pid} is suspended (SIGSTOP); kill -CONT {owner.pid} resumes it")
    return Status(RUNNING)


def _on_another_host(owner: Owner, file: Path, now: float) -> Status:
    heartbeat = last_heartbeat(file)
    silence = now - heartbeat / 1e9 if heartbeat is not None else 0.0
    if silence <= TIMERS.lock_stale:
        return Status(RUNNING)
    process = f"process {owner.pid} on {owner.host}" if owner.pid else "a process"
    return Status(UNKNOWN, f"no heartbeat of {process} for {age(silence)}: killed, suspended, or the clocks differ")
