"""What Lightning saves and reads checkpoints with: directories of ours, and .ckpt files as its own."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

from rankzero.runs.checkpoints.atomic_files import replacing
from rankzero.runs.checkpoints.hyper_parameters import with_plain_hyper_parameters
from rankzero.runs.checkpoints.safe_load import load
from rankzero.runs.checkpoints.snapshot import Snapshots
from rankzero.runs.checkpoints.write import remove_directory, write_directory, write_state
from rankzero.runs.checkpoints.writer_thread import BackgroundWriter


class DirectoryCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their place and renames them into it; reads them without running anything in them.

    A path that ends in .ckpt is one file, as Lightning's own, and written at once: that is how a user's ModelCheckpoint
    goes on working.

    Args:
        trusted: Whether what is read may hold more than tensors and plain types, and so run any code.

    Attributes:
        on_committed: Called after each save of a directory in `folder`, by the thread that wrote it.
        on_error: Called by the thread that writes, where a save or `on_committed` fails.
        trusted_sha256: The sha256 of a state that may run code, since rank zero found that a run of this user wrote it.
        folder: Where the run's own checkpoints go, None for anywhere. A thread writes them, from a copy, while training
            continues; what is saved elsewhere is written at once.
        last_seconds: How long the last save of a directory took, from the copy until it was on the disk.
    """

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self.on_committed: Callable[[Path], None] | None = None
        self.on_error: Callable[[Path, Exception], None] | None = None
        self.trusted_sha256 = ""
        self.folder: Path | None = None
        self.last_seconds: float | None = None
        self._snapshots, self._writer = Snapshots(), BackgroundWriter()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        if place.suffix == ".ckpt":
            with replacing(place) as beside:
                write_state(checkpoint, beside)
            return
        checkpoint = with_plain_hyper_parameters(checkpoint)
        self.wait()
        started = time.monotonic()
        if self.folder is not None and place.parent != self.folder:
            write_directory(checkpoint, place)
        else:
            self._writer.start(partial(self._commit_or_tell, self._snapshots.take(checkpoint), place, started))

    def wait(self) -> None:
        """Waits until no save is under way."""
        self._writer.wait()

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.wait()
        trusted = self.trusted if weights_only is None else not weights_only
        return load(Path(path), map_location or "cpu", trusted, self.trusted_sha256)

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path):
            super().remove_checkpoint(path)
        elif Path(path).is_dir():
            remove_directory(Path(path))
        else:
            Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.wait()
        self._snapshots = Snapshots()

    def _commit_or_tell(self, checkpoint: dict[str, Any], place: Path, started: float) -> None:
        try:
            self._commit(checkpoint, place, started)
        except Exception as error:
            if self.on_error is None:
                raise  # the thread's own traceback is better than nothing
            self.on_error(place, error)

    def _commit(self, checkpoint: dict[str, Any], place: Path, started: float) -> None:
        write_directory(checkpoint, place)
        self.last_seconds = time.monotonic() - started
        if self.on_committed is not None:
            self.on_committed(place)
