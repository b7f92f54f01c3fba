"""Mirror of a run at a URL: written in the background, and downloaded by a start whose disk lacks the run.

URL/NAME/
  checkpoints/step-00001234/    state.pt, then manifest.json, without which the copy is not complete
  checkpoints.before-3/         newer checkpoints from which attempt 3 did not resume
  run.json, metrics.jsonl, ...  the files of `_SMALL_FILES`
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import fsspec

from rankzero.checkpoints.atomic_files import make_folder, replacing, sync_folder
from rankzero.checkpoints.manifest import (
    MANIFEST,
    REPLACED,
    STATE,
    Retention,
    checkpoints_in,
    has_valid_manifest,
    part_of,
    step_of,
    verify,
)
from rankzero.checkpoints.write import remove_directory
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.timers import TIMERS, Progress
from rankzero.messages import RequestError, TakenOverError, print_error, print_notice
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import RunOptions, is_restart
from rankzero.runs.secrets import prose_without_secrets
from rankzero.text import compact, duration

_SMALL_FILES = (
    *("run.json", "summary.json", "config.yaml", "metrics.jsonl", "report.html"),
    *("attempts/*/*", "tensorboard/*", "figures/*"),
)
"""Files that are copied whenever they have changed."""

_DOWNLOAD = ".download"
"""Folder in the run's directory for checkpoints that are being downloaded."""


class Mirror:
    """Copy of a run at a URL of fsspec. Only rank zero creates one, with the run locked.

    An error of the storage does not end the run: a thread repeats the copy until it succeeds.

    Args:
        url: Folder of the mirrors of all runs.
        run: The run, whose name is final.

    Raises:
        RequestError: The URL cannot be written, or needs a package that is not installed.
    """

    def __init__(self, url: str, run: RunDirectory) -> None:
        self.run, self._flag = run, f"--mirror {prose_without_secrets(url)}"
        self._place = prose_without_secrets(f"{url.rstrip('/')}/{run.name}")
        self._complete: dict[str, bytes] = {}  # name of each complete checkpoint in the mirror -> its manifest
        self._copied: dict[str, tuple[int, int]] = {}  # path in the mirror -> time and size of the copied file
        self._has_copied = self._is_due = self._is_over = False
        self._lock, self._retry = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error, self._failing_since = "", 0.0
        try:
            self._storage, path = fsspec.url_to_fs(url)
            self._root = f"{path.rstrip('/')}/{run.name}"
            self._make_folder(path)
            self._storage.pipe_file(f"{self._root}.writable", b"")
            self._storage.rm_file(f"{self._root}.writable")
        except Exception as error:  # each storage has errors of its own
            package = getattr(error.__cause__, "name", None) if isinstance(error, ImportError) else None
            instead = f"pip install {package}" if package else "--mirror URL of a folder to write to"
            raise RequestError(self._flag, _text(error), instead) from None

    def restore(self, options: RunOptions, launch: Launch) -> None:
        """Downloads the run if this disk does not have it, or if only the mirror has its newest checkpoint.

        Raises:
            RequestError: The mirror belongs to another run, or cannot be read, or `--resume never` was requested.
        """
        try:
            self._restore(options, launch)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"to download {self._place}", _text(error), "the same command again") from None
        finally:
            shutil.rmtree(self.run.path / _DOWNLOAD, ignore_errors=True)

    def _restore(self, options: RunOptions, launch: Launch) -> None:
        try:
            record = json.loads(self._storage.cat_file(f"{self._root}/run.json"))
        except FileNotFoundError:
            return
        asked, found = f"run {self.run.name} with {self._flag}", f"a run that was created at {record['created']}"
        another = "--name ANOTHER-NAME, or another --mirror URL"
        if self.run.exists and self.run.read("run.json").get("id") != record["id"]:
            raise RequestError(asked, f"{self._place} contains {found}; {self.run.path} is another run", another)
        if options.resume == "never" and not is_restart(launch, record["attempts"][-1]):
            raise RequestError(f"a new {asked}", f"{self._place} contains {found}", f"{another}, or --resume auto")
        self._storage.invalidate_cache()
        entries = self._storage.find(self._root, detail=True)
        sizes = {path[len(self._root) :]: int(entry["size"] or 0) for path, entry in entries.items()}
        part, folder, started = self.run.part, self.run.path / _DOWNLOAD, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        for place in map(PurePosixPath, sizes):
            if place.match(f"/checkpoints/*/{MANIFEST}"):
                make_folder(folder / place.parent.name)
                (folder / place.parent.name / MANIFEST).write_bytes(self._storage.cat_file(f"{self._root}{place}"))
        self._complete = {path.name: (path / MANIFEST).read_bytes() for path in checkpoints_in(folder)}
        local = [path for path in checkpoints_in(self.run.checkpoints, part, part) if has_valid_manifest(path)]
        newer = [path for path in checkpoints_in(folder, part, part) if not local or step_of(path) > step_of(local[-1])]
        if self.run.exists and not newer:
            return
        best = Retention(best=options.keep_best).best_in(folder, part)
        small = [path for path in sizes if any(PurePosixPath(path).match(f"/{pattern}") for pattern in _SMALL_FILES)]
        self._announce(f"{len(small)} files of run {self.run.name}", sum(sizes[path] for path in small))
        for path in sorted(small, key="/run.json".__eq__):  # `run.json` last, because with it the run exists
            with replacing(self.run.path / path[1:]) as temporary:
                self._storage.get_file(f"{self._root}{path}", str(temporary))
        any(self._download(checkpoint, sizes) for checkpoint in reversed(newer))
        if best is not None and not (self.run.checkpoints / best.name).exists():
            self._download(best, sizes)
        print_notice(f"downloaded run {self.run.name} in {duration(time.monotonic() - started)}")

    def _download(self, path: Path, sizes: Mapping[str, int]) -> bool:
        """Downloads the state of a checkpoint to `path`, which has its manifest; returns False if it is damaged."""
        place, target = f"/checkpoints/{path.name}", self.run.checkpoints / path.name
        self._announce(path.name, sizes.get(f"{place}/{STATE}", 0))
        try:
            self._storage.get_file(f"{self._root}{place}/{STATE}", str(path / STATE))
            verify(path)
        except (FileNotFoundError, ValueError) as error:
            print_error(f"skipped: {str(error).replace(str(path), f'{self._place}{place}')}")
            return False
        if target.exists():
            remove_directory(target)  # damaged
        make_folder(target.parent)
        path.rename(target)
        sync_folder(target.parent)
        return True

    def _announce(self, what: str, size: int) -> None:
        print_notice(f"downloading {what} from {self._place}: {compact(size)}B")

    def copy(self) -> None:
        """Begins to copy what the mirror lacks, in the background. Any thread may call."""
        with self._lock:
            self._is_due = True
            self._retry.set()
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(target=self._copy_until_done, name="rankzero-mirror", daemon=True)
                self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copies what the mirror lacks and waits for the end of the copy; prints a line if it does not end in time.

        Args:
            seconds: Longest time to wait. While the storage reports errors, the limit is `TIMERS.mirror_error`.
        """
        self.copy()
        progress, started = Progress(seconds), time.monotonic()
        while (thread := self._thread) is not None and not self._is_over:
            thread.join(TIMERS.poll)
            progress.print_if_due(lambda: f"the last copy to {self._place}")
            now = time.monotonic()
            has_failed = self._error and now - max(started, self._failing_since) > TIMERS.mirror_error
            if self._thread is not None and (has_failed or now - started > seconds):
                self._is_over = True
                self._retry.set()
                reason = self._error or f"the last copy did not end within {seconds:g} s"
                newest = max(self._complete, key=_position, default="none")
                text = f"{self._place} is not up to date: {reason}; its newest complete checkpoint is {newest}"
                print_error(f"{text}; the same command on this disk copies the rest")

    def _copy_until_done(self) -> None:
        pause = TIMERS.slow_poll
        while True:
            with self._lock:
                if self._is_over or not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
                self._retry.clear()
            try:
                self._copy_all()
            except TakenOverError:  # the newer attempt copies the run
                self._is_over = True
            except Exception as error:
                self._report(error)
                self._is_due = True
                self._retry.wait(pause)
                pause = min(2 * pause, TIMERS.mirror_error)
            else:
                if self._error:
                    print_notice(f"copied to {self._place}, which works again")
                self._error, pause = "", TIMERS.slow_poll

    def _report(self, error: Exception) -> None:
        if not self._error:
            self._failing_since = time.monotonic()
            self._copied.clear()  # a storage that was restarted may have lost files
            text = f"the copy to {self._place} failed: {_text(error)}; the run continues, and the copy is repeated"
            print_error(text)
            logging.getLogger("rankzero").warning(text)
        self._error = _text(error)

    def _copy_all(self) -> None:
        has_begun = self.run.attempt > 0  # a finished run begins no attempt
        if has_begun:
            self.run.assert_owner()
        if not self._missing():
            self._copy_small_files()
        while missing := self._missing():
            self._copy_checkpoint(missing[-1])
        if has_begun:
            self._remove_pruned()

    def _missing(self) -> list[Path]:
        """Returns the checkpoints that the mirror lacks, oldest first."""
        local = checkpoints_in(self.run.checkpoints)
        return [path for path in local if _manifest_of(path) not in (None, self._complete.get(path.name))]

    def _copy_checkpoint(self, path: Path) -> None:
        """Copies a checkpoint, and between its two files all small files, so that the curves reach its step."""
        place, manifest = f"{self._root}/checkpoints/{path.name}", _manifest_of(path)
        if path.name in self._complete:  # the step was saved again
            self._move(path.name, place + REPLACED)
            self._complete[path.name + REPLACED] = b""
        try:
            self._put(path / STATE)
        except FileNotFoundError:
            if path.exists():
                raise
            return  # the run has removed it meanwhile
        self._copy_small_files()
        if manifest is not None:
            self._storage.pipe_file(f"{place}/{MANIFEST}", manifest)
            self._complete[path.name], self._has_copied = manifest, True

    def _copy_small_files(self) -> None:
        for path in [path for pattern in _SMALL_FILES for path in self.run.path.glob(pattern)]:
            if not path.name.startswith("."):
                self._put(path)

    def _put(self, path: Path) -> None:
        """Copies a file of the run, unless it has not changed since it was copied."""
        target, status = f"{self._root}/{path.relative_to(self.run.path).as_posix()}", path.stat()
        if self._copied.get(target) != (status.st_mtime_ns, status.st_size):
            self._make_folder(PurePosixPath(target).parent.as_posix())
            self._storage.put_file(str(path), target)
            self._copied[target] = status.st_mtime_ns, status.st_size

    def _remove_pruned(self) -> None:
        """Removes what the run has removed, and moves newer checkpoints from which it did not resume."""
        local = checkpoints_in(self.run.checkpoints)
        if not local or local[-1].name not in self._complete:
            return
        for name in self._complete.keys() - {path.name for path in local}:
            if _position(name) > _position(local[-1].name):
                self._move(name, f"{self._root}/checkpoints.before-{self.run.attempt}/{name}")
            elif self._has_copied:
                self._remove(name)

    def _move(self, name: str, target: str) -> None:
        self._make_folder(target)
        with suppress(FileNotFoundError):  # an earlier try has moved it
            self._storage.cp_file(f"{self._root}/checkpoints/{name}/{STATE}", f"{target}/{STATE}")
        self._storage.pipe_file(f"{target}/{MANIFEST}", self._complete[name])
        self._remove(name)

    def _remove(self, name: str) -> None:
        place = f"{self._root}/checkpoints/{name}"
        with suppress(FileNotFoundError):
            self._storage.rm_file(f"{place}/{MANIFEST}")  # first, so that the rest does not count
        with suppress(FileNotFoundError):
            self._storage.rm(place, recursive=True)
        self._copied.pop(f"{place}/{STATE}", None)
        del self._complete[name]

    def _make_folder(self, path: str) -> None:
        if not self._storage.async_impl:  # an object storage has no folders, and would create a bucket
            self._storage.makedirs(path, exist_ok=True)


def _text(error: Exception) -> str:
    return prose_without_secrets(f"{type(error).__name__}: {error}")


def _manifest_of(checkpoint: Path) -> bytes | None:
    """Returns the manifest of a checkpoint as it was written; None if the run has removed the checkpoint."""
    try:
        return (checkpoint / MANIFEST).read_bytes()
    except OSError:
        return None


def _position(name: str) -> tuple[int, int]:
    """Returns the part and the step of a checkpoint, which later ones exceed."""
    return part_of(Path(name)), step_of(Path(name))
