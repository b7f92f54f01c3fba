"""DataLoader that reads a user's data in the run's order of samples."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from rankzero.sampling.batch_sampler import EVEN, ElasticBatchSampler, Share
from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler
from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import Positions, epoch_key
from rankzero.sampling.seeded_dataset import SeededDataset
from rankzero.sampling.workers import IgnoreStopSignals, blocked_signals

AHEAD_BYTES = 2**18
"""Approximate limit (bytes) for small batches that are read together: they fit in a processor's nearest caches."""


_OWN = ("_users", "_reader", "_broadcast", "_read", "batch_sampler", "_iterator", "__class__")


class ManagedLoader(DataLoader[Any]):
    """DataLoader with the data, workers and collate function of a user's loader, but in the run's order of samples.

    It is an instance of the user's loader class and has the attributes of the user's loader, such as data set and
    settings. An internal copy of that loader reads the batches. The copy's sampler is replaced without torch's check
    against changes to a loader in use, because the copy is not in use yet.

    Args:
        loader: The user's loader.
        batches: The run's order of samples.
        broadcast: Sends an object from rank zero to all ranks. All ranks must call.
    """

    batch_sampler: ElasticBatchSampler | EvaluationBatchSampler
    _users: DataLoader[Any]
    _reader: DataLoader[Any]
    _broadcast: Callable[[Any], Any]
    _read: deque[Share]

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: ElasticBatchSampler | EvaluationBatchSampler,
        broadcast: Callable[[Any], Any],
    ) -> None:
        # Does not call DataLoader.__init__: all attributes come from the user's loader.
        own: dict[str, Any] = {"_users": loader, "batch_sampler": batches, "_broadcast": broadcast, "_read": deque()}
        vars(self).update({**vars(loader), **own})
        self.__class__ = _class_like(type(loader))  # type: ignore[arg-type]
        reading = SeededDataset(loader.dataset, gathers=loader.collate_fn is default_collate)
        self._reader = copy.copy(loader)
        vars(self._reader).update(
            dataset=reading,
            batch_sampler=batches,
            sampler=batches,
            batch_size=None,
            drop_last=False,
            collate_fn=_Collate(as_it_is if reading.gathers else loader.collate_fn),
            worker_init_fn=IgnoreStopSignals(loader.worker_init_fn),
            # A loader draws its workers' seed from this generator, so that the global generator stays unchanged.
            generator=loader.generator or torch.Generator().manual_seed(batches.seed),
            _iterator=None,
        )

    @property
    def users_loader(self) -> "DataLoader[Any]":
        """The user's loader."""
        return self._users

    @property
    def sampler(self) -> ElasticBatchSampler | EvaluationBatchSampler:  # type: ignore[override]
        """The run's order of samples."""
        return self.batch_sampler

    @property
    def _iterator(self) -> Any:
        """Iterator of the copy that reads; Lightning uses this attribute to shut down loader processes."""
        return self._reader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._reader._iterator = value

    def __getattr__(self, name: str) -> Any:
        if name == "_users":
            raise AttributeError(name)
        return getattr(self._users, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in _OWN:
            setattr(self._users, name, value)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Returns this rank's batches. All ranks must read in lockstep, because rank zero broadcasts empty batches."""
        self._read = deque()
        if self._reads_here:
            return self._batches(self._read_here())
        with blocked_signals():
            reader = iter(self._reader)
        return self._batches(reader)

    def next_share(self) -> Share:
        """Returns this rank's share of the next batch, in the order in which batches were read."""
        return self._read.popleft() if self._read else EVEN

    @property
    def _reads_here(self) -> bool:
        """Whether batches can be read in this process, without torch's DataLoader."""
        users = self._users
        pins = users.pin_memory and torch.cuda.is_available()
        return type(users) is DataLoader and not users.num_workers and not pins and users.generator is None

    def _read_here(self) -> Iterator[Any]:
        """Returns the same batches as a DataLoader without loader processes."""
        reading, order = self._reader.dataset, self.batch_sampler
        assert isinstance(reading, SeededDataset)
        if reading.reads_ahead and isinstance(order, ElasticBatchSampler):
            batches = read_ahead(reading, order.arrays(), epoch_key(order.seed, order.epoch))
        elif reading.gathers_rows and isinstance(order, ElasticBatchSampler):
            return map(reading.gather, order.arrays())
        else:
            batches = (reading.__getitems__(indices) for indices in iter(order))
        return map(self._reader.collate_fn, batches)

    def _batches(self, reader: Iterator[Any]) -> Iterator[Any]:
        # A user's loader class may return more batches than its sampler has.
        for batch, share in zip(reader, chain(self.batch_sampler.shares(), repeat(EVEN)), strict=False):
            if share.has_empty_rank:
                # Rank zero always has a sample, so it sends an empty batch of the same structure to the other ranks.
                empty = self._broadcast(None if batch is None else emptied(batch))
                batch = empty if batch is None else batch
            if batch is not None:  # Lightning skips a batch that is None
                self._read.append(share)
            yield batch


@lru_cache
def _class_like(kind: type["DataLoader[Any]"]) -> type[ManagedLoader]:
    """Returns a subclass of both `ManagedLoader` and the loader class `kind`."""
    if kind is DataLoader:
        return ManagedLoader
    try:
        return type(f"Ordered{kind.__name__}", (ManagedLoader, kind), {})
    except TypeError:  # a class that cannot be subclassed
        return ManagedLoader


def read_ahead(reading: SeededDataset, batches: Iterator[Positions], key: int) -> Iterator[Any]:
    """Reads several small batches at once and yields them one by one.

    Gathering thirty numbers takes as long as gathering thousands.

    Args:
        reading: Data set that returns a batch as tensors.
        batches: Samples of each batch.
        key: Key of the epoch, see `rankzero.sampling.permutation.epoch_key`.
    """
    ahead = 1
    while drawn := list(islice(batches, ahead)):
        sizes = [samples.size for samples in drawn]
        if len(drawn) == 1 or not all(sizes):
            for samples in drawn:
                batch = reading.__getitems__(Indices.of(samples, key))
                if samples.size:
                    ahead = _how_many(batch)
                yield batch
            continue
        gathered = reading.__getitems__(Indices.of(np.concatenate(drawn), key))
        # `.data` gives each batch its own version counter, so that autograd ignores in-place changes of other batches.
        for parts in zip(*([rows.data for rows in part.split(sizes)] for part in gathered), strict=True):
            yield type(gathered)(parts)


def _how_many(batch: Any) -> int:
    """Returns how many batches of this size are read at once."""
    if type(batch) not in (tuple, list) or not all(type(part) is Tensor for part in batch):
        return 1
    return 1 + AHEAD_BYTES // (1 + sum(int(part.nbytes) for part in batch))


def as_it_is(batch: Any) -> Any:
    """Returns a batch unchanged, because it is already collated."""
    return batch


class _Collate:
    """Collate function that leaves None unchanged, because None stands for an empty batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        return None if samples is None else self.collate(samples)


def emptied(batch: Any) -> Any:
    """Returns a batch of the same structure without samples; None in place of values that cannot be emptied."""
    if isinstance(batch, Tensor):
        return batch[:0].detach().cpu() if batch.ndim else None
    if isinstance(batch, Mapping):
        return {key: emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(emptied, batch))
    if isinstance(batch, list | tuple):
        if any(isinstance(value, Tensor | Mapping | list | tuple) for value in batch):
            return type(batch)(map(emptied, batch))
        return type(batch)()
    return None
