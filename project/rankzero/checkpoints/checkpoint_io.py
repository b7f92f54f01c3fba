"""Lightning plugin that saves and reads checkpoints: Rankzero's directories and Lightning's .ckpt files."""

import io
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import UntypedStorage
from torch.storage import TypedStorage

from rankzero.checkpoints.atomic_files import replacing
from rankzero.checkpoints.hyper_parameters import with_plain_hyper_parameters
from rankzero.checkpoints.manifest import VerifiedState
from rankzero.checkpoints.safe_load import ReadOnce, load
from rankzero.checkpoints.write import remove_directory, write_directory, write_state
from rankzero.distributed.torch_inside import untyped

Pool = dict[tuple[int, bool], list[UntypedStorage]]
"""Maps (size in bytes, whether pinned) to storages of that kind."""


class Snapshots:
    """Takes copies of states. Each copy reuses the memory of the previous copy, so only the last one is valid.

    Reused memory is written several times as fast as new memory. The copy of a GPU tensor is in pinned memory. The GPU
    copies it after the work that it has been given so far and before all later work, which may change the tensor.
    """

    def __init__(self) -> None:
        self._reusable: Pool = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> Any:
        """Copies a state to the CPU; tensors that share memory also share it in the copy.

        Does not wait for a GPU: call `wait` before reading the copy. Objects are copied through their pickle methods,
        which `torch.save` uses too.

        Raises:
            Exception: An object cannot be pickled; `torch.save` would fail as well.
        """
        content = io.BytesIO()
        pickler = _CopyPickler(content, self._reusable)
        pickler.dump(state)
        self._reusable = pickler.used
        self._copied = torch.cuda.Event() if any(pinned for _, pinned in pickler.used) else None
        if self._copied is not None:
            self._copied.record()
        content.seek(0)
        return _CopyUnpickler(content, pickler.copies).load()

    def wait(self) -> None:
        """Waits until the GPU has made the last copy. Any thread may call."""
        if self._copied is not None:
            self._copied.synchronize()


class _CopyPickler(pickle.Pickler):
    """Pickler that copies the storages of tensors and pickles everything else."""

    def __init__(self, content: io.BytesIO, reusable: Pool) -> None:
        super().__init__(content, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[UntypedStorage] = []
        self.used: Pool = defaultdict(list)
        self._reusable = reusable
        self._numbers: dict[UntypedStorage, int] = {}

    def persistent_id(self, item: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(item, TypedStorage):
            return self._number(untyped(item)), item.dtype
        return (self._number(item), None) if isinstance(item, UntypedStorage) else None

    def _number(self, storage: UntypedStorage) -> int:
        if storage not in self._numbers:
            self._numbers[storage] = len(self.copies)
            self.copies.append(self._copy(storage))
        return self._numbers[storage]

    def _copy(self, storage: UntypedStorage) -> UntypedStorage:
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        if reusable := self._reusable.get((size, pinned)):
            copy = reusable.pop()
        else:
            copy = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        self.used[size, pinned].append(copy)
        return copy.copy_(storage, non_blocking=pinned)


class _CopyUnpickler(pickle.Unpickler):
    """Unpickler that rebuilds the state on the copied storages."""

    def __init__(self, content: io.BytesIO, copies: list[UntypedStorage]) -> None:
        super().__init__(content)
        self._copies = copies

    def persistent_load(self, token: tuple[int, torch.dtype | None]) -> Any:
        storage, dtype = self._copies[token[0]], token[1]
        return storage if dtype is None else TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class DirectoryCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and reads them without running code from them unless they are trusted.

    A path that ends in .ckpt becomes a single file, as in Lightning, before `save_checkpoint` returns. A user's
    ModelCheckpoint therefore keeps working.

    Args:
        trusted: Whether to read checkpoints that contain more than tensors and plain types, and so can run any code.

    Attributes:
        accepts: Decides in the writer thread whether a checkpoint is written to `folder`; None writes all.
        on_committed: Called with the path after each save in `folder`, in the writer thread.
        on_error: Called with the path and the error if such a save or `on_committed` fails, in the writer thread.
        trusted_sha256: sha256 of a state that may run code because rank zero found that a run of this user wrote it.
        verified: The state of a checkpoint that this process has read, for the next `load_checkpoint`.
        read_once: Reads a checkpoint for all ranks; None while a single rank may call `load_checkpoint`.
        folder: Folder of the run's checkpoints; None means any folder. A thread writes them from a copy while training
            continues. A directory elsewhere is written before `save_checkpoint` returns.
        holds: Whether `save_checkpoint` keeps a checkpoint in `folder` in memory, for `write_held`, and writes nothing.
        kept: Paths that `remove_checkpoint` leaves: a script that starts again may load them.
        last_seconds: Duration of the last save in `folder`, from the copy until it was on the disk; at first None.
    """

    def __init__(self, trusted: bool = False) -> None:
        self.trusted = trusted
        self.accepts: Callable[[dict[str, Any], Path], bool] | None = None
        self.on_committed: Callable[[Path], None] | None = None
        self.on_error: Callable[[Path, Exception], None] | None = None
        self.trusted_sha256 = ""
        self.verified: VerifiedState | None = None
        self.read_once: ReadOnce | None = None
        self.folder: Path | None = None
        self.last_seconds: float | None = None
        self.holds, self.kept = False, set[str]()
        self._snapshots = Snapshots()
        self._writer: threading.Thread | None = None
        self._held: tuple[dict[str, Any], Path] | None = None
        self._after_save: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the Trainer, which has its own thread and memory."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    def call_after_saves(self, function: Callable[[], None]) -> None:
        """Calls a function after each save in `folder` and after `on_committed`, in the writer thread."""
        self._after_save = function

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        if target.suffix == ".ckpt":
            with replacing(target) as temporary:
                write_state(checkpoint, temporary)
            return
        checkpoint = with_plain_hyper_parameters(checkpoint)
        if self.folder is not None and target.parent != self.folder:
            self.wait()
            write_directory(checkpoint, target)
            return
        with self._lock:
            if self.holds:
                if self._writer is None or not self._writer.is_alive():  # an earlier copy is not being written
                    self._held = None
                    self._held = self._snapshots.take(checkpoint), target
                return
            self.wait()
            self._held, started = None, time.monotonic()  # the copies share their memory
            self._start_to_write(self._snapshots.take(checkpoint), target, started)

    def write_held(self) -> None:
        """Starts to write the held checkpoint, if there is one. Any thread may call."""
        with self._lock:
            if self._held is not None and not self._held[1].exists():
                held, self._held = self._held, None
                self._start_to_write(*held, time.monotonic())

    def _start_to_write(self, *save: Any) -> None:
        """Starts a save in a new thread once the current save has ended; the process does not exit before its end."""
        self.wait()
        self._writer = threading.Thread(target=self._commit_or_report, args=save, name="rankzero-writer", daemon=False)
        self._writer.start()

    def wait(self) -> None:
        """Waits until no save is running; returns at once in the thread of a save."""
        if (writer := self._writer) not in (None, threading.current_thread()):
            writer.join()
            if self._writer is writer:  # no other thread has started the next save meanwhile
                self._writer = None

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.wait()
        trusted = self.trusted if weights_only is None else not weights_only
        verified, self.verified = self.verified, None
        return load(path, map_location or "cpu", trusted, self.trusted_sha256, self.read_once, verified)

    def remove_checkpoint(self, path: str | Path) -> None:
        if str(path) in self.kept:
            return
        if "://" in str(path):
            super().remove_checkpoint(path)
        elif Path(path).is_dir():
            remove_directory(Path(path))
        else:
            Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.wait()
        with self._lock:
            self._held, self._snapshots, self.verified = None, Snapshots(), None

    def _commit_or_report(self, checkpoint: dict[str, Any], path: Path, started: float) -> None:
        try:
            self._snapshots.wait()
            if self.accepts is None or self.accepts(checkpoint, path):
                write_directory(checkpoint, path)
                self.last_seconds = time.monotonic() - started
                if self.on_committed is not None:
                    self.on_committed(path)
                if self._after_save is not None:
                    self._after_save()
        except Exception as error:
            if self.on_error is None:
                raise  # the thread prints a traceback
            self.on_error(path, error)
