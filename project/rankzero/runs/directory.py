"""Where a run keeps its files, its id and its attempts. Imports no torch.

runs/<name>/
  run.json                id, created, attempts so far
  summary.json            written at the end of every attempt
  config.yaml             what the newest attempt ran with; attempts/0001/config.yaml, ... keep all of them
  checkpoints/step-00001234/
  tensorboard/            one directory over all attempts
  logs/                   rank-000.log ...
"""

import contextlib
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

from rankzero.messages import RequestError, TakenOverError
from rankzero.runs.checkpoints.atomic_files import SAVING, make_folder, write_text


@dataclass
class RunDirectory:
    """The directory of one run.

    Args:
        path: `root/name`.
        title: `<model>-<data>` where the name is the next free number behind it; None where the name is settled.
        id: What tells this run from all others, once an attempt has begun.
        attempt: Number of the attempt that is under way; 0 before `begin_attempt`.
        fresh: Whether this attempt made the directory.
        moved: What this attempt has put aside: where it was, and where it is.
    """

    path: Path
    title: str | None = None
    attempt: int = 0
    id: str = ""
    fresh: bool = False
    moved: list[tuple[Path, Path]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        """Whether a run of this name has begun."""
        return (self.path / "run.json").is_file()

    def follow(self, other: "RunDirectory") -> None:
        """Takes over what rank zero has decided of this run."""
        vars(self).update(vars(other))

    def log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.path / "logs" / f"rank-{rank:03d}.log"

    def read(self, name: str) -> dict[str, Any]:
        """Reads `run.json` or `summary.json`; empty where it is not there or not whole."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def started_by(self, job_id: str) -> bool:
        """Whether the newest attempt was one of this scheduler's or torchrun's job."""
        attempts = self.read("run.json").get("attempts") or [{}]
        return bool(attempts[-1].get("job") == job_id)

    def check_writable(self) -> None:
        """Holds that the directory can be made, or written, without making anything.

        Raises:
            RequestError: It cannot.
        """
        folder = self.path.parent
        try:
            _check_writable(folder)
            if self.path.exists():
                _check_writable(self.path)
        except OSError as error:
            raise cannot_write(folder, error) from None

    def begin_attempt(self, config: str, job_id: str | None = None) -> None:
        """Makes the directory if need be and notes that an attempt begins. Rank zero alone calls this.

        Args:
            config: The YAML that this attempt runs with.
            job_id: What the scheduler or torchrun calls the job.

        Raises:
            RequestError: The directory cannot be written.
        """
        try:
            self._create()
            (self.path / "logs").mkdir(exist_ok=True)
            for leftover in self.path.glob(f".*{SAVING}"):  # of an attempt that was killed
                leftover.unlink(missing_ok=True)
            record = self.read("run.json") or {"id": uuid.uuid4().hex, "created": _now(), "attempts": []}
            self.attempt, self.id = len(record["attempts"]) + 1, record["id"]
            attempt = {"number": self.attempt, "started": _now(), "host": socket.gethostname(), "job": job_id}
            record["attempts"].append(attempt)
            kept = self.path / "attempts" / f"{self.attempt:04d}"
            kept.mkdir(parents=True, exist_ok=True)
            write_text(kept / "config.yaml", config)
            write_text(self.path / "config.yaml", config)
            write_text(self.path / "run.json", json.dumps(record, indent=2) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.discard_attempt()
            raise cannot_write(self.path, error) from None

    def assert_owner(self) -> None:
        """Holds that no other attempt has begun since: one of a job, say, that was requeued when a node was lost.

        Raises:
            TakenOverError: One has; it carries on, and this one has to leave the files alone.
        """
        record = self.read("run.json")
        attempts = record.get("attempts") or []
        if len(attempts) > self.attempt or (attempts and record.get("id") != self.id):  # another id: --resume never
            newer = attempts[-1]
            raise TakenOverError(
                f"attempt {newer['number']} at run {self.name} has begun on {newer['host']}; this one ends"
            )

    def _create(self) -> None:
        """Makes the directory; two starts at the same time never get the same number."""
        while True:
            try:
                self.path.mkdir(parents=True)
            except FileExistsError:
                if self.title is None:
                    return
                self.path = next_free(self.path.parent, self.title)
            else:
                self.fresh = True
                return

    def discard_attempt(self) -> None:
        """Takes back `begin_attempt`, for an attempt that turned out to be impossible before its first step."""
        if self.fresh and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path, ignore_errors=True)
            self._put_back()
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # the root, if nothing else is in it
            return
        self._put_back()
        shutil.rmtree(self.path / "attempts" / f"{self.attempt:04d}", ignore_errors=True)
        record = self.read("run.json")
        if len(record.get("attempts", [])) >= self.attempt > 0:
            record["attempts"] = record["attempts"][: self.attempt - 1]
            write_text(self.path / "run.json", json.dumps(record, indent=2) + "\n")
        before = self.path / "attempts" / f"{self.attempt - 1:04d}" / "config.yaml"
        if before.is_file():
            write_text(self.path / "config.yaml", before.read_text())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`, whole or not at all."""
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def archive(self) -> Path:
        """Renames an earlier run of this name, so that a new one can begin; returns where it is now."""
        aside = next_free(self.path.parent, f"{self.name}.before")
        self._move({self.path: aside})
        return aside

    def archive_checkpoints(self, checkpoints: Sequence[Path]) -> Path:
        """Moves checkpoints to a folder beside the others, where they are not taken for newer; returns it."""
        aside = next_free(self.path, "checkpoints.before")
        self._move({path: aside / path.name for path in checkpoints})
        return aside

    def _move(self, moves: Mapping[Path, Path]) -> None:
        try:
            for place, aside in moves.items():
                make_folder(aside.parent)
                place.rename(aside)
                self.moved.append((place, aside))
        except OSError as error:
            self._put_back()
            raise cannot_write(self.path, error) from None

    def _put_back(self) -> None:
        """Takes back what was put aside, for an attempt that does not come to be."""
        for place, aside in reversed(self.moved):
            with contextlib.suppress(OSError):
                aside.rename(place)
                if aside.parent != place.parent and not any(aside.parent.iterdir()):
                    aside.parent.rmdir()
        self.moved.clear()


def choose_run(root: str, name: str | None, title: str, job_id: str | None) -> RunDirectory:
    """Chooses the run's directory, which need not exist. Rank zero alone calls this.

    Args:
        root: Where runs are kept.
        name: `--name`, if given.
        title: `<model>-<data>`, what an unnamed run is called.
        job_id: What the scheduler calls the job, so that a requeued job finds its own run.

    Raises:
        RequestError: The root cannot be read.
    """
    folder = Path(root).expanduser()
    try:
        if not (name or job_id):
            return RunDirectory(next_free(folder, title), title)
        return RunDirectory(folder / (name or f"{title}-{job_id}"))
    except OSError as error:
        raise cannot_write(folder, error) from None


def next_free(folder: Path, title: str) -> Path:
    """The first `<title>-<n>` in `folder` that does not exist."""
    number = 1
    while (path := folder / f"{title}-{number}").exists():
        number += 1
    return path


def _check_writable(folder: Path) -> None:
    """Raises an OSError where nothing can be made in `folder`, without making anything."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write in {existing.resolve()}")
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise OSError(f"{existing.resolve()} is on a read-only file system")


def cannot_write(folder: Path, error: OSError) -> RequestError:
    """The error for a run directory that cannot be written."""
    return RequestError(
        f"to keep the run in {folder}", str(error), "--root DIR, where DIR is a folder you may write to"
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
