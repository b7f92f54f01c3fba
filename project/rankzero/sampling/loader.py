"""DataLoader that reads a user's data in the run's order of samples."""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from rankzero.distributed.torch_inside import prepared_batches
from rankzero.sampling.batch_sampler import (
    EVEN_SHARE,
    MANY_IN_FLIGHT,
    ElasticBatchSampler,
    EvaluationBatchSampler,
    Share,
)
from rankzero.sampling.permutation import Indices, Positions, epoch_key
from rankzero.sampling.seeded_dataset import SeededDataset
from rankzero.sampling.workers import PrepareWorker, blocked_signals, raise_if_worker_died

AHEAD_BYTES, AHEAD_BYTES_ON_DEVICE = 2**18, 2**23
"""Approximate limits (bytes) for small batches that are read together: a processor's nearest caches, and little memory
of a GPU."""

_MAX_ITEMS = 100
"""Number of items of a container that are searched; a list of a million numbers contains no tensor."""

_OWN = (
    *("user_loader", "_reader", "_broadcast", "_shares", "_reading", "_to_device", "stream"),
    *("batch_sampler", "_iterator", "__class__"),
)


class ManagedLoader(DataLoader[Any]):
    """DataLoader with the data, workers and collate function of a user's loader, but in the run's order of samples.

    It is an instance of the user's loader class and has the attributes of the user's loader, such as data set and
    settings. An internal copy of that loader reads the batches. The copy's sampler is replaced without torch's check
    against changes to a loader in use, because the copy is not in use yet.
    """

    batch_sampler: ElasticBatchSampler | EvaluationBatchSampler

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: ElasticBatchSampler | EvaluationBatchSampler,
        broadcast: Callable[[Any], Any],
    ) -> None:
        # Does not call DataLoader.__init__: all attributes come from the user's loader.
        vars(self).update(vars(loader))
        self.user_loader, self.batch_sampler, self._broadcast = loader, batches, broadcast
        self._shares: deque[Share] = deque()
        self._reading: Callable[[], Any] = lambda: None
        self._to_device: DeviceCopies | None = None
        self.__class__ = managed_class(type(loader), ManagedLoader)  # type: ignore[arg-type]
        is_batched = loader.batch_sampler is not None
        seeded_dataset = SeededDataset(loader.dataset, loader.collate_fn is default_collate, is_batched)
        self._reader = copy.copy(loader)
        vars(self._reader).update({"batch_size": None, "drop_last": False, "pin_memory": False, "_iterator": None})
        vars(self._reader).update(
            dataset=seeded_dataset,
            batch_sampler=batches,
            sampler=batches,
            collate_fn=Collate(identity) if seeded_dataset.gathers else Collate(loader.collate_fn, is_batched),
            worker_init_fn=PrepareWorker(loader.worker_init_fn),
            # A loader draws its workers' seed from this generator, so that the global generator stays unchanged.
            generator=loader.generator or torch.Generator().manual_seed(batches.seed),
        )

    def read_for(self, device: torch.device, copies: bool, channels_last: bool = False) -> None:
        """Prepares for a run on a GPU.

        A data set with a method `on_device(device)` that returns another data set than None is read from that one. Its
        batches are the same, but on the GPU. `pin_memory=False` in the user's loader prevents it.

        With `copies`, batches are copied to the GPU here, before Lightning's hooks for a transfer; with
        `channels_last`, images take that memory layout, which the model's weights have.
        """
        loader = self.user_loader
        self._reader.pin_memory = loader.pin_memory and not (copies and not loader.num_workers)
        if not copies:
            return
        self._to_device = DeviceCopies(device, channels_last)
        if loader.pin_memory and self._can_read_in_process and hasattr(type(loader.dataset), "on_device"):
            on_device = loader.dataset.on_device(device)  # type: ignore[attr-defined]
            if on_device is not None:
                vars(self._reader)["dataset"], self._to_device = SeededDataset(on_device), None

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The user's sampler if it draws the samples, else the run's order of samples."""
        return self.user_loader.sampler if self.batch_sampler.drawn else self.batch_sampler

    @property
    def _iterator(self) -> Any:
        """Iterator of the copy that reads; Lightning uses this attribute to shut down loader processes."""
        return self._reader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._reader._iterator = value

    def __reduce__(self) -> Any:
        """Makes the copy of a Trainer contain the user's loader, from which its next fit creates its own."""
        return identity, (self.user_loader,)

    def __getattr__(self, name: str) -> Any:
        if name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in _OWN:
            setattr(self.user_loader, name, value)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Returns this rank's batches. All ranks must read in lockstep, because rank zero broadcasts empty batches."""
        self._shares = deque()
        if self._can_read_in_process:
            batches = self._batches(self._read_in_process())
        else:
            with blocked_signals():
                reader = iter(self._reader)
            if self._reader.num_workers:
                self._reading = weakref.ref(reader)  # a plain reference would keep the loader processes alive
            batches = self._batches(reader)
        return map(self._to_device, batches) if self._to_device else batches

    @property
    def prepared_batches(self) -> int | None:
        """Number of batches that the loader processes hold ready; None without loader processes (torch 2.15)."""
        reader = self._reading()
        return None if reader is None else prepared_batches(reader)

    def next_share(self) -> Share:
        """Returns this rank's share of the next batch, in the order in which batches were read."""
        return self._shares.popleft() if self._shares else EVEN_SHARE

    @property
    def _can_read_in_process(self) -> bool:
        """Whether batches can be read in this process, without torch's DataLoader."""
        loader, pins_memory = self.user_loader, self._reader.pin_memory
        return type(loader) is DataLoader and not loader.num_workers and not pins_memory and loader.generator is None

    def _read_in_process(self) -> Iterator[Any]:
        """Returns the same batches as a DataLoader without loader processes."""
        dataset, order = self._reader.dataset, self.batch_sampler
        assert isinstance(dataset, SeededDataset)
        training = order if isinstance(order, ElasticBatchSampler) and not order.drawn else None
        if dataset.reads_ahead and training:
            batches = read_ahead(dataset, training.arrays(), epoch_key(training.seed, training.epoch))
        elif dataset.gathers_rows and training:
            return map(dataset.gather, training.arrays())
        else:
            batches = (dataset.__getitems__(indices) for indices in iter(order))
        return map(self._reader.collate_fn, batches)

    def _batches(self, reader: Iterator[Any]) -> Iterator[Any]:
        # A user's loader class may return more batches than its sampler has.
        try:
            for batch, share in zip(reader, chain(self.batch_sampler.shares(), repeat(EVEN_SHARE)), strict=False):
                if share.has_empty_rank:
                    # Rank zero always has a sample, so it sends an empty batch of the same structure to other ranks.
                    empty = self._broadcast(None if batch is None else empty_batch_like(batch))
                    batch = empty if batch is None else batch
                if batch is not None:  # Lightning skips a batch that is None
                    self._shares.append(share)
                yield batch
        except (ConnectionError, EOFError) as error:
            raise_if_worker_died(reader, error)
            raise


@lru_cache
def managed_class(loader_class: type["DataLoader[Any]"], base: type[ManagedLoader]) -> type[ManagedLoader]:
    """Returns a subclass of both `base` and the user's loader class."""
    return base if loader_class is DataLoader else type(f"Ordered{loader_class.__name__}", (base, loader_class), {})


def read_ahead(dataset: SeededDataset, batches: Iterator[Positions], key: int) -> Iterator[Any]:
    """Reads several small batches at once and yields them one by one.

    Gathering thirty numbers takes as long as gathering thousands.
    """
    batches_per_read = 1
    while samples_of_batches := list(islice(batches, batches_per_read)):
        sizes = [samples.size for samples in samples_of_batches]
        if len(samples_of_batches) == 1 or not all(sizes):
            for samples in samples_of_batches:
                batch = dataset.__getitems__(Indices.from_array(samples, key))
                if samples.size:
                    batches_per_read = _batches_per_read(batch)
                yield batch
            continue
        gathered = dataset.__getitems__(Indices.from_array(np.concatenate(samples_of_batches), key))
        # `.data` gives each batch its own version counter, so that autograd ignores in-place changes of other batches.
        for parts in zip(*([rows.data for rows in part.split(sizes)] for part in gathered), strict=True):
            yield type(gathered)(parts)


def _batches_per_read(batch: Any) -> int:
    """Returns how many batches of this size are read at once."""
    if type(batch) not in (tuple, list) or not all(type(part) is Tensor for part in batch):
        return 1
    limit = AHEAD_BYTES if batch[0].is_cpu else AHEAD_BYTES_ON_DEVICE
    return min(MANY_IN_FLIGHT // 2, 1 + limit // (1 + sum(int(part.nbytes) for part in batch)))


class DeviceCopies:
    """Copies batches to a GPU while the step before is running there.

    The copies have a stream of their own and start from pinned memory, so that neither the host nor the step before
    waits for them. torch takes pinned memory from a pool, to which it returns after the copy.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device, self._stream, self._channels_last = device, torch.cuda.Stream(device), channels_last

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with its tensors on the GPU; Lightning copies those in other types than those below."""
        current_stream = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            batch = self._copy(batch, current_stream)
        current_stream.wait_stream(self._stream)
        return batch

    def _copy(self, value: Any, used_by: torch.cuda.Stream) -> Any:
        if type(value) is Tensor and value.is_cpu and value.layout is torch.strided:
            value = value.clone() if 0 in value.stride() else value  # torch cannot pin the result of `expand`
            value = value.pin_memory().to(self._device, non_blocking=True)
            if self._channels_last and value.dim() == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            value.record_stream(used_by)  # otherwise a later copy would reuse the memory too early
        elif type(value) in (tuple, list):
            value = type(value)(self._copy(element, used_by) for element in value)
        elif type(value) is dict:
            value = {key: self._copy(element, used_by) for key, element in value.items()}
        return value


def identity(batch: Any) -> Any:
    """Returns a batch unchanged, because it is already collated."""
    return batch


class Collate:
    """Collate function that leaves None unchanged, because None stands for an empty batch.

    A StopIteration of the user's function becomes an error; it would end the epoch early. If the loader is not
    `is_batched`, the function gets the only item of a batch.
    """

    def __init__(self, collate: Callable[[Any], Any], is_batched: bool = True) -> None:
        self.collate, self.is_batched = collate, is_batched

    def __call__(self, samples: Any) -> Any:
        try:
            return None if samples is None else self.collate(samples if self.is_batched else samples[0])
        except StopIteration as error:
            raise RuntimeError("the collate function raised StopIteration") from error


def empty_batch_like(batch: Any) -> Any:
    """Returns a batch of the same structure without samples; None in place of values that cannot be emptied."""
    if isinstance(batch, Tensor):
        return batch[:0].detach().cpu() if batch.ndim else None
    if isinstance(batch, Mapping):
        return {key: empty_batch_like(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(empty_batch_like, batch))
    if isinstance(batch, list | tuple):
        if any(isinstance(value, Tensor | Mapping | list | tuple) for value in batch):
            return type(batch)(map(empty_batch_like, batch))
        return type(batch)()
    return None


def batch_size(batch: Any) -> int | None:
    """Returns the number of samples in a batch, or None if it is unknown.

    This is the length of the first tensor, as in Lightning's `extract_batch_size`, or of the first array. Unlike that
    function, it reads no elements of arrays and no iterators, and raises no errors of user-defined containers.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is Tensor and (shape := first.shape):  # most batches, without generators
        return shape[0] or 1
    try:
        return next(_lengths(batch), None)
    except Exception:
        return None


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor) or isinstance(getattr(batch, "shape", None), tuple):
        yield (batch.shape[0] if len(batch.shape) else 1) or 1
    elif isinstance(batch, Mapping):
        for value in islice(batch.values(), _MAX_ITEMS):
            yield from _lengths(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _lengths(getattr(batch, field.name))
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes | Iterator):
        for item in islice(batch, _MAX_ITEMS):
            yield from _lengths(item)


def samples_in(batch: Any, share: Share) -> int:
    """Returns the number of this rank's samples in a batch."""
    return share.samples if share is not EVEN_SHARE else batch_size(batch) or 1
