"""Copies of a state in memory, which can be written to disk while training changes the original."""

import io
import pickle
from collections import defaultdict
from typing import Any

import torch
from torch import UntypedStorage
from torch.storage import TypedStorage

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

        Does not wait for a GPU: call `wait` before reading the copy.

        Objects are copied through their pickle methods, which `torch.save` uses too.

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
        self._numbers: dict[int, int] = {}
        self._originals: list[UntypedStorage] = []  # keeps each storage alive, so that no `id` is reused

    def persistent_id(self, item: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(item, TypedStorage):
            return self._number(untyped(item)), item.dtype
        return (self._number(item), None) if isinstance(item, UntypedStorage) else None

    def _number(self, storage: UntypedStorage) -> int:
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = len(self.copies)
            self._originals.append(storage)
            self.copies.append(self._copy(storage))
        return self._numbers[id(storage)]

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
        number, dtype = token
        storage = self._copies[number]
        return storage if dtype is None else TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
