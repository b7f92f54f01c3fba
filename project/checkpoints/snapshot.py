"""A copy of a state as it is at one moment, to be written while the state goes on changing."""

import io
import pickle
from collections import defaultdict
from typing import Any

import torch
from torch import UntypedStorage
from torch.storage import TypedStorage


class Snapshots:
    """Takes copies of states, each into the memory of the one before: only one of them is good at a time.

    Memory that is there already is written several times as fast as new memory, and where the state is on a GPU, the
    copy is in pinned memory.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[int, bool], list[UntypedStorage]] = {}

    def take(self, state: Any) -> Any:
        """Copies a state, with its tensors on the CPU; tensors that share memory share it in the copy.

        Like `torch.save`, it goes by what objects say of themselves when they are pickled.

        Raises:
            Exception: Something in it cannot be pickled, as `torch.save` would find too.
        """
        taking, content = _Taking(content := io.BytesIO(), self._spare), content
        taking.dump(state)
        if any(storage.is_pinned() for storage in taking.copies):
            torch.cuda.synchronize()
        self._spare = taking.pool()
        content.seek(0)
        return _Giving(content, taking.copies).load()


class _Taking(pickle.Pickler):
    """Pickles all but the storages of tensors, which it copies."""

    def __init__(self, content: io.BytesIO, spare: dict[tuple[int, bool], list[UntypedStorage]]) -> None:
        super().__init__(content, protocol=pickle.HIGHEST_PROTOCOL)
        self.copies: list[UntypedStorage] = []
        self._spare = spare
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(item, TypedStorage):
            return self._number(item._untyped_storage), item.dtype
        return (self._number(item), None) if isinstance(item, UntypedStorage) else None

    def _number(self, storage: UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.copies)
            self.copies.append(self._copy(storage))
        return self._numbers[storage._cdata]

    def _copy(self, storage: UntypedStorage) -> UntypedStorage:
        pinned = storage.device.type == "cuda"
        spare = self._spare.get((storage.nbytes(), pinned))
        if spare:
            copy = spare.pop()
        else:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        return copy.copy_(storage, non_blocking=pinned)

    def pool(self) -> dict[tuple[int, bool], list[UntypedStorage]]:
        """The copies by size, for the next one to write into."""
        found = defaultdict(list)
        for storage in self.copies:
            found[storage.nbytes(), storage.is_pinned()].append(storage)
        return found


class _Giving(pickle.Unpickler):
    """Builds the state again, on the copies."""

    def __init__(self, content: io.BytesIO, copies: list[UntypedStorage]) -> None:
        super().__init__(content)
        self._copies = copies

    def persistent_load(self, token: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = token
        storage = self._copies[number]
        return storage if dtype is None else TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
