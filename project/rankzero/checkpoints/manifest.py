"""Manifest of a checkpoint: describes the checkpoint and verifies its files. Does not import torch.

checkpoints/step-00001234/
  state.pt         state that Lightning saves
  manifest.json    format, epoch, step, and size and sha256 of each file; written last. Has a `signature` if reading the
                   state runs code, see `rankzero.checkpoints.safe_load`

The name begins with `part-2-` if the second `fit` of a Trainer saved the checkpoint, and so on.
`step-00001234.replaced` is an earlier checkpoint of the same step, which exists while the step is saved again. A folder
whose name begins with a dot is being written or deleted.
"""

import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import psutil

FORMAT = 3
STATE, MANIFEST = "state.pt", "manifest.json"
SIGNATURE = "signature"
REPLACED = ".replaced"

_ENTRIES = {"format", "epoch", "step", "rankzero", "contents", "needs", "files", "sha256"}
ANY_PART = sys.maxsize
_NAME = re.compile(r"(?:part-([0-9]+)-)?step-([0-9]+)(\.replaced)?")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.(saving|deleting)")


def manifest_text(content: Mapping[str, Any]) -> str:
    """Returns the canonical text of a manifest, including the sha256 of all other entries.

    Raises:
        TypeError: The content includes a value that JSON cannot represent.
        ValueError: The content includes a number that is not finite.
    """
    plain = json.loads(json.dumps(content, allow_nan=False))  # converts all keys to strings before sorting
    return _dump({**plain, "sha256": _hash_of(plain)}) + "\n"


def read_manifest(checkpoint: Path) -> Mapping[str, Any]:
    """Reads the manifest of a checkpoint directory.

    Raises:
        ValueError: The manifest is missing, has changed since it was written, or has an unknown format.
    """
    try:
        with open_plain(checkpoint / MANIFEST) as file:
            data = file.read(1 << 26)
        content: dict[str, Any] = json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{checkpoint} is not a complete checkpoint: {MANIFEST} cannot be read ({error})") from None
    try:
        _check_manifest(content, data)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {MANIFEST} {error}") from None
    return content


def verify(checkpoint: Path) -> None:
    """Checks the files of a checkpoint against its manifest.

    Raises:
        ValueError: A file is missing or has changed since it was written.
    """
    open_verified(checkpoint, in_memory=False).file.close()


class VerifiedState(NamedTuple):
    """The state of a checkpoint directory, which has been checked against the manifest, as a file at its beginning.

    No other process can change a copy in memory before it is used.
    """

    checkpoint: Path
    sha256: str
    file: BinaryIO
    is_in_memory: bool


def open_verified(checkpoint: Path, in_memory: bool | None = None) -> VerifiedState:
    """Opens the state of a checkpoint directory after checking it against the manifest.

    By default, the state is read into memory if it takes at most a quarter of the free memory.

    Raises:
        ValueError: The state or the manifest is missing or has changed since it was written.
    """
    expected = read_manifest(checkpoint)["files"][STATE]
    if in_memory is None:
        in_memory = expected["bytes"] <= psutil.virtual_memory().available // 4
    try:
        file = open_plain(checkpoint / STATE)
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        raise ValueError(f"{checkpoint}: {STATE} is missing" if is_missing else str(error)) from None
    try:
        size = os.fstat(file.fileno()).st_size
        if in_memory and size == expected["bytes"]:
            with file:
                file = io.BytesIO(file.read(size))
            size = len(file.getvalue())
        _check_content(file, size, expected)
    except (OSError, ValueError) as error:
        file.close()
        raise ValueError(f"{checkpoint}: {STATE} {error}") from None
    return VerifiedState(checkpoint, expected["sha256"], file, in_memory)


def open_plain(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Does not block on a pipe and follows no symbolic link.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The path is not a regular file.
    """
    if path.is_symlink():
        raise ValueError(f"{path} is a link, not a file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def checkpoints_in(folder: Path, first_part: int = 1, last_part: int = ANY_PART) -> list[Path]:
    """Returns the checkpoints of some parts of a run, oldest first, without those that are still being written."""
    if not folder.is_dir():
        return []
    matching = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    matching = [path for path in matching if first_part <= part_of(path) <= last_part]
    return sorted(matching, key=lambda path: (*_part_and_step(path), not path.name.endswith(REPLACED)))


def directory_of(path: Path) -> Path:
    """Returns the checkpoint directory that contains a state file; any other path unchanged."""
    return path.parent if path.name == STATE and (path.parent / MANIFEST).is_file() else path


def file_of(path: Path) -> Path:
    """Returns the state file of a checkpoint directory, which `torch.load` reads; any other path unchanged."""
    return path / STATE if (path / MANIFEST).is_file() else path


def step_of(checkpoint: Path) -> int:
    """Returns the number of optimizer steps in a checkpoint of `checkpoints_in`."""
    return _part_and_step(checkpoint)[1]


def part_of(checkpoint: Path) -> int:
    """Returns the part of the run that saved a checkpoint of `checkpoints_in`."""
    return _part_and_step(checkpoint)[0]


def _part_and_step(checkpoint: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1] or 1), int(match[2])


def newest_valid(folder: Path, last_part: int = ANY_PART) -> tuple[Path | None, list[str]]:
    """Finds the newest checkpoint in a folder that passes verification, up to a part of the run.

    Returns:
        Path of the checkpoint or None, and the reason for refusing each newer one.
    """
    state, refusals = open_newest(folder, in_memory=False, last_part=last_part)
    if state:
        state.file.close()
    return (state.checkpoint if state else None), refusals


def open_newest(
    folder: Path, in_memory: bool | None = None, first_part: int = 1, last_part: int = ANY_PART
) -> tuple[VerifiedState | None, list[str]]:
    """Opens the newest checkpoint of some parts of a run that passes verification.

    Returns:
        The state of the checkpoint or None, and the reason for refusing each newer one.
    """
    refusals: list[str] = []
    for checkpoint in reversed(checkpoints_in(folder, first_part, last_part)):
        try:
            return open_verified(checkpoint, in_memory), refusals
        except (OSError, ValueError) as error:
            refusals.append(str(error))
    return None, refusals


def clean(folder: Path) -> list[Path]:
    """Removes the leftovers of interrupted saves and deletions. No save may be running in this folder.

    Returns:
        Removed paths.
    """
    leftovers = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)] if folder.is_dir() else []
    replaced = [path for path in checkpoints_in(folder) if path.name.endswith(REPLACED)]
    leftovers += [path for path in replaced if is_valid(path.with_name(path.name.removesuffix(REPLACED)))]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return sorted(path for path in leftovers if not path.exists())


def is_valid(checkpoint: Path) -> bool:
    """Returns whether the checkpoint exists and passes verification."""
    try:
        verify(checkpoint)
    except (OSError, ValueError):
        return False
    return True


def has_valid_manifest(checkpoint: Path) -> bool:
    """Returns whether the checkpoint exists and has a valid manifest, which is written last."""
    try:
        read_manifest(checkpoint)
    except ValueError:
        return False
    return True


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False)


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def _check_manifest(content: Any, data: bytes) -> None:
    """Raises a ValueError if a manifest is invalid; the message is the end of a sentence about the manifest."""
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise ValueError("states no format")
    if content["format"] != FORMAT:
        raise ValueError(f"has format {str(content['format'])[:20]}; this version reads format {FORMAT}")
    rest = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != _hash_of(rest) or (_dump(content) + "\n").encode() != data:
        raise ValueError("differs from the file that was written (another sha256)")
    files = content.get("files")
    if set(content) - {SIGNATURE} != _ENTRIES or not isinstance(files, dict) or set(files) != {STATE}:
        raise ValueError("has other entries than a manifest of this format")


def _check_content(file: BinaryIO, size: int, expected: Mapping[str, Any]) -> None:
    """Raises a ValueError if a file has changed; the message is the end of a sentence about the file."""
    if size != expected["bytes"]:
        difference = "truncated" if size < expected["bytes"] else "longer than when it was written"
        sizes = f"{size:,} bytes of {expected['bytes']:,}"
        raise ValueError(f"differs from the file that was written: {difference} ({sizes})")
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    if digest.hexdigest() != expected["sha256"]:
        raise ValueError("differs from the file that was written (another sha256)")
    file.seek(0)


@dataclass(frozen=True)
class Retention:
    """Rule that keeps the newest checkpoints, and the last and the best one by a metric at the end of each part.

    When the run's script starts again, it restores the last checkpoint of a part that has ended, and may test the best.

    Args:
        keep: Number of newest checkpoints to keep.
        best: `min:NAME` or `max:NAME` with the metric that selects the best checkpoint; None for no best checkpoint.
    """

    keep: int = 3
    best: str | None = None

    def surplus(self, folder: Path) -> list[Path]:
        """Returns the checkpoints to delete, oldest first."""
        checkpoints = checkpoints_in(folder)
        older = checkpoints[: -self.keep]
        kept = {part_of(path): path for path in checkpoints}  # part -> its last checkpoint
        scores = self._scores(checkpoints) if older else {}
        best = {self._best({path: scores[path] for path in scores if part_of(path) <= part}) for part in kept}
        return [path for path in older if path not in best.union(kept.values())]

    @property
    def metric(self) -> str | None:
        """Name of the metric that selects the best checkpoint; None without one."""
        return self.best.partition(":")[2] if self.best else None

    def best_in(self, folder: Path, last_part: int = ANY_PART) -> Path | None:
        """Returns the best checkpoint up to a part of the run.

        It is the oldest of equal ones, because later ones can repeat a metric computed for it.
        """
        return self._best(self._scores(checkpoints_in(folder, last_part=last_part)))

    def _scores(self, checkpoints: list[Path]) -> dict[Path, float]:
        scores = {path: self.score_of(path) for path in checkpoints} if self.best else {}
        return {path: score for path, score in scores.items() if score is not None}

    def _best(self, scores: dict[Path, float]) -> Path | None:
        choose = min if str(self.best).startswith("min:") else max
        return choose(scores, key=scores.__getitem__, default=None)

    def score_of(self, checkpoint: Path) -> float | None:
        """Returns the value of the metric in a checkpoint; None if it has none."""
        try:
            metrics = read_manifest(checkpoint)["rankzero"].get("metrics")
        except ValueError:
            return None
        value = metrics.get(self.metric) if isinstance(metrics, dict) else None
        return value if isinstance(value, int | float) else None
