"""Directory of a run: its files, its id and its attempts. Does not import torch.

runs/<name>/
  run.json                id, creation time, attempts so far
  summary.json            written at the end of every attempt
  report.html             the same as a page, with curves; written at the end of every attempt that has trained
  config.yaml             configuration of the newest attempt
  attempts/0001/          config.yaml, environment.json and summary.json of each attempt
  checkpoints/step-00001234/   part-2-step-00001234/ if the second `fit` of a Trainer saved it
  tensorboard/            one directory for all attempts
  figures/                images (PNG) for the report, if there are any
  profile/attempt-0001/   rank-000.json.gz and rank-000.txt of each profiled rank, with --profile
  logs/                   rank-000.log ...
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankzero.checkpoints.atomic_files import SAVING, make_folder, write_text
from rankzero.messages import RequestError, TakenOverError, print_error


@dataclass
class RunDirectory:
    """Directory of one run.

    Args:
        path: `root/name`.
        title: `<model>-<data>` if the name is this title with the next free number; None if the name is final.
        attempt: Number of the current attempt; 0 before `begin_attempt`.
        id: Unique id of the run; empty before `begin_attempt`.
        is_new: Whether this attempt created the directory.
        archived_paths: Paths that this attempt has archived, as pairs (original path, new path).
        part: Number of the call of a Trainer's `fit`, among the calls that train; each of them is a part of the run.
        job_title: `<model>-<data>-<job>`, if the name is this title with the number of the run in the job; else None.
        record: Content of `run.json` that `begin_attempt` has written.
    """

    path: Path
    title: str | None = None
    attempt: int = 0
    id: str = ""
    is_new: bool = False
    archived_paths: list[tuple[Path, Path]] = field(default_factory=list)
    part: int = 1
    job_title: str | None = None
    record: dict[str, Any] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.path.name

    @property
    def is_kept(self) -> bool:
        """Whether the run has a directory; one whose root is `os.devnull` writes and reads no file."""
        return self.path.parent != Path(os.devnull)

    @property
    def location(self) -> str:
        """Path of the directory, or the reason why there is none, for messages."""
        return str(self.path) if self.is_kept else f"{self.name}, which writes no files"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        """Whether a run of this name has begun."""
        return (self.path / "run.json").is_file()

    @property
    def attempt_folder(self) -> Path:
        """Folder of the current attempt."""
        return self.path / "attempts" / f"{self.attempt:04d}"

    def checkpoint(self, step: int) -> Path:
        """Returns the path of a checkpoint of the current part."""
        return self.checkpoints / f"{f'part-{self.part}-' * (self.part > 1)}step-{step:08d}"

    def log(self, rank: int) -> Path:
        """Returns the path of one rank's log."""
        return Path(os.devnull) if not self.is_kept else self.path / "logs" / f"rank-{rank:03d}.log"

    def read(self, name: str) -> dict[str, Any]:
        """Reads a JSON object from a file, by its path in the directory; returns {} if it is missing or damaged."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The records of all attempts in `run.json`, oldest first."""
        return self.read("run.json").get("attempts") or []

    @property
    def newest_attempt(self) -> dict[str, Any]:
        """The record of the newest attempt in `run.json`; empty before the first."""
        return next(reversed(self.attempts), {})

    def summary_of_part(self) -> dict[str, Any]:
        """Reads the newest summary of the current part; {} if no attempt of this part has ended."""
        summary = self.read("summary.json")
        if summary.get("part", self.part) == self.part:
            return summary
        numbers = [attempt["number"] for attempt in self.attempts if attempt.get("part", 1) == self.part]
        summaries = (self.read(f"attempts/{number:04d}/summary.json") for number in reversed(numbers))
        return next(filter(None, summaries), {})

    def continue_in_process(self) -> None:
        """Prepares another attempt of this process at the run that its earlier attempt has begun, if any.

        If another Trainer, such as a copy, has begun or continued this run, an unnamed one gets another directory.
        """
        is_unnamed = self.title is not None or self.job_title is not None
        if self.attempt and not (is_unnamed and self.is_taken_over):
            self.title, self.job_title, self.is_new, self.archived_paths = None, None, False, []
        elif self.job_title is not None:
            if _job_runs.get(self.path):
                self.path, self.attempt, self.part = reserve_job_path(self.path.parent, self.job_title), 0, 1
            _job_runs[self.path] = True
        elif self.title is not None and self.is_kept and not self._is_claimed:
            self.path = next_free_path(self.path.parent, self.title)
            self.attempt, self.part, self.is_new, self.archived_paths = 0, 1, False, []

    def check_writable(self) -> None:
        """Checks that the directory can be created or written. Creates nothing.

        Raises:
            RequestError: The directory cannot be created or written.
        """
        if not self.is_kept:
            return
        try:
            for folder in (self.path.parent, self.path):
                existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
                if not existing.is_dir():
                    raise NotADirectoryError(f"{existing} is a file")
                if not os.access(existing, os.W_OK | os.X_OK):
                    raise PermissionError(f"no permission to write in {existing.resolve()}")
        except OSError as error:
            raise cannot_write_error(self.path.parent, error) from None

    def begin_attempt(self, config: str, job_id: str | None = None, step: int = 0) -> None:
        """Creates the directory if necessary and records a new attempt. Only rank zero calls this.

        Raises:
            RequestError: The directory cannot be written.
        """
        if not self.is_kept:
            self.attempt, self.id = self.attempt + 1, uuid.uuid4().hex
            return
        try:
            self._create()
            (self.path / "logs").mkdir(exist_ok=True)
            for leftover in self.path.glob(f".*{SAVING}"):  # temporary files of a killed attempt
                leftover.unlink(missing_ok=True)
            record = self.read("run.json") or {"id": uuid.uuid4().hex, "created": _now(), "attempts": []}
            self.attempt, self.id = len(record["attempts"]) + 1, record["id"]
            attempt = {"number": self.attempt, "started": _now(), "host": socket.gethostname(), "job": job_id}
            attempt |= {"step": step, "part": self.part}
            record["attempts"].append(attempt)
            self.attempt_folder.mkdir(parents=True, exist_ok=True)
            write_text(self.attempt_folder / "config.yaml", config)
            write_text(self.path / "config.yaml", config)
            write_text(self.path / "run.json", json.dumps(record, indent=2) + "\n")
            self.record = record
        except OSError as error:
            with contextlib.suppress(OSError):
                self.discard_attempt()
            raise cannot_write_error(self.path, error) from None

    def assert_owner(self) -> None:
        """Checks that no newer attempt has begun, for example by a job that was requeued after a node was lost.

        Raises:
            TakenOverError: A newer attempt has begun; this one must no longer change the run's files.
        """
        record = self.read("run.json")
        attempts = record.get("attempts") or []
        if len(attempts) > self.attempt or (attempts and record.get("id") != self.id):  # new id: --resume never
            newer = f"attempt {attempts[-1]['number']} at run {self.name} has started on {attempts[-1]['host']}"
            raise TakenOverError(f"{newer}; this attempt ends")

    @property
    def is_taken_over(self) -> bool:
        """Whether a newer attempt has begun, see `assert_owner`."""
        try:
            self.assert_owner()
        except TakenOverError:
            return True
        return False

    def claim(self) -> None:
        """Creates the directory of an unnamed run before its first attempt, which then uses it. For rank zero.

        Raises:
            RequestError: The directory cannot be created.
        """
        if self.title is not None and not self.attempt and self.is_kept and not self._is_claimed:
            try:
                self._create()
            except OSError as error:
                raise cannot_write_error(self.path.parent, error) from None

    @property
    def _is_claimed(self) -> bool:
        """Whether `claim` has created the directory, and no copy of this run has begun in it."""
        return self.is_new and not self.attempt and not self.exists

    def _create(self) -> None:
        """Creates the directory; concurrent starts of unnamed runs never get the same number."""
        while True:
            try:
                self.path.mkdir(parents=True)
            except FileExistsError:
                if self.title is None or self._is_claimed:
                    return
                self.path = next_free_path(self.path.parent, self.title)
            else:
                self.is_new = True
                return

    def discard_attempt(self) -> None:
        """Undoes `begin_attempt`, for an attempt that turned out to be impossible before its first step."""
        if not self.is_kept:
            return
        if self.is_new and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path, ignore_errors=True)
            self.attempt, self.is_new = 0, False
            self._restore_archived()
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # the root, if it is empty
            return
        self._restore_archived()
        shutil.rmtree(self.attempt_folder, ignore_errors=True)
        record = self.read("run.json")
        if len(record.get("attempts", [])) >= self.attempt > 0:
            record["attempts"] = record["attempts"][: self.attempt - 1]
            write_text(self.path / "run.json", json.dumps(record, indent=2) + "\n")
        previous_config = self.path / "attempts" / f"{self.attempt - 1:04d}" / "config.yaml"
        if previous_config.is_file():
            write_text(self.path / "config.yaml", previous_config.read_text())

    def restore_record(self) -> None:
        """Writes `run.json` again if the directory was deleted while the run trained. Only rank zero calls this."""
        if self.record and not (self.path / "run.json").exists():
            print_error(f"{self.path} was deleted while the run trained; it contains only what was written since")
            with contextlib.suppress(OSError):  # the next write reports it
                self.attempt_folder.mkdir(parents=True, exist_ok=True)
                write_text(self.path / "run.json", json.dumps(self.record, indent=2) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json` atomically, and a copy that later attempts do not replace; prints a write error."""
        if not self.is_kept:
            return
        text = json.dumps(summary, indent=2) + "\n"
        self.restore_record()
        try:
            write_text(self.path / "summary.json", text)
            write_text(self.attempt_folder / "summary.json", text)
        except OSError as error:
            print_error(f"summary.json could not be written: {error}")

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Writes `environment.json` of the current attempt, unless the disk refuses it."""
        with contextlib.suppress(OSError):
            write_text(self.attempt_folder / "environment.json", json.dumps(environment, indent=2) + "\n")

    def archive(self) -> Path:
        """Renames an earlier run of this name, so that a new one can begin; returns the new path."""
        archive_path = next_free_path(self.path.parent, f"{self.name}.before")
        self._move({self.path: archive_path})
        return archive_path

    def archive_checkpoints(self, checkpoints: Sequence[Path]) -> Path:
        """Moves checkpoints to a new folder in the run's directory, outside `checkpoints`; returns the folder."""
        archive_folder = next_free_path(self.path, "checkpoints.before")
        self._move({path: archive_folder / path.name for path in checkpoints})
        return archive_folder

    def _move(self, moves: Mapping[Path, Path]) -> None:
        try:
            for original, archived in moves.items():
                make_folder(archived.parent)
                original.rename(archived)
                self.archived_paths.append((original, archived))
        except OSError as error:
            self._restore_archived()
            raise cannot_write_error(self.path, error) from None

    def _restore_archived(self) -> None:
        """Moves archived paths back, for an attempt that cannot begin."""
        for original, archived in reversed(self.archived_paths):
            with contextlib.suppress(OSError):
                archived.rename(original)
                if archived.parent != original.parent and not any(archived.parent.iterdir()):
                    archived.parent.rmdir()
        self.archived_paths.clear()


def choose_run(root: str, name: str | None, title: str, job_id: str | None) -> RunDirectory:
    """Chooses the run's directory, which need not exist. Only rank zero calls this.

    Raises:
        RequestError: The root cannot be read, or is a URL.
    """
    if "://" in root:
        found = "a run is stored in a folder, and this is a URL"
        raise RequestError(f"runs in {root}", found, "--root FOLDER; --mirror URL copies the run to a URL")
    folder = expanded(root)
    try:
        if not (name or job_id):
            return RunDirectory(next_free_path(folder, title), title)
        if name:
            return RunDirectory(folder / name)
        job_title = f"{title}-{job_id}"
        return RunDirectory(reserve_job_path(folder, job_title), job_title=job_title)
    except OSError as error:
        raise cannot_write_error(folder, error) from None


def expanded(path: str | Path) -> Path:
    """Returns a path with the home directory in place of `~`; `~name` remains if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises RuntimeError for an unknown user


def next_free_path(folder: Path, title: str) -> Path:
    """Returns the first path `<title>-<n>` in `folder` that does not exist, with n from 1."""
    paths = (folder / f"{title}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


_job_runs: dict[Path, bool] = {}
"""Directory of an unnamed run of this process, in a job -> whether a `fit` has begun to use it."""


def reserve_job_path(folder: Path, title: str) -> Path:
    """Reserves the path of the next unnamed run of this process; the same one after a restart of the job."""
    paths = (folder / f"{title}{f'-{number}' * (number > 1)}" for number in itertools.count(1))
    path = next(path for path in paths if path not in _job_runs)
    _job_runs[path] = False
    return path


def cannot_write_error(folder: Path, error: OSError) -> RequestError:
    """Returns the error for a run directory that cannot be written."""
    instead = "--root DIR, where DIR is a folder where you may write"
    return RequestError(f"a run directory in {folder}", str(error), instead)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
