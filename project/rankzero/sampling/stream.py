"""DataLoader of a stream: the user's code decides which samples each rank reads, and in which order."""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count, pairwise
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rankzero.distributed.devices import GatheredRows
from rankzero.messages import RunError, few, print_notice
from rankzero.sampling import generators
from rankzero.sampling.batch_sampler import EVEN_SHARE, Share
from rankzero.sampling.loader import ManagedLoader, batch_size, empty_batch_like, managed_class
from rankzero.sampling.permutation import draw_key
from rankzero.sampling.workers import blocked_signals

SEED_STEP = 0x9E3779B97F4A7C15
"""Difference between the seeds of consecutive batches, an odd number with well-spread bits."""

DIGEST_BYTES = 2**20
"""Bytes of each tensor of a batch that are compared between ranks."""

DIVISIONS = {
    "datasets": "datasets.distributed.split_dataset_by_node(dataset, trainer.global_rank, trainer.world_size)",
    "webdataset": "WebDataset(..., nodesplitter=webdataset.split_by_node, workersplitter=webdataset.split_by_worker)",
}
"""Package -> what divides its streams among the ranks."""

_END = object()

_NO_OTHERS = torch.zeros(3, 1)
"""What a single process would gather after its data has ended."""


class StreamLoader(ManagedLoader):
    """DataLoader that reads what the user's loader reads, see `Stream`."""

    def __init__(self, loader: "DataLoader[Any]", stream: "Stream") -> None:
        # Does not call ManagedLoader.__init__, because the user's loader decides the order.
        vars(self).update(vars(loader))
        self.user_loader, self.stream, self._reader = loader, stream, stream.reader
        self.__class__ = managed_class(type(loader), StreamLoader)  # type: ignore[arg-type, assignment]

    def read_for(self, device: torch.device, copies: bool, channels_last: bool = False) -> None:
        """Does nothing: Lightning copies these batches to a GPU."""

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        return self.user_loader.sampler

    def __len__(self) -> int:
        """Returns the number of batches of the rank that has the most."""
        if self.stream.length is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return self.stream.length

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Returns this rank's batches. All ranks must read in lockstep."""
        return iter(self.stream)

    @property
    def prepared_batches(self) -> int | None:
        return None

    def next_share(self) -> Share:
        return self.stream.next_share()


class Stream:
    """The batches of a loader whose order is the user's, and the position of this rank in them.

    Before the ranks train on a batch, they begin to gather how many samples each of them has. A rank whose data has
    ended takes part in the steps of the others with an empty batch, or with its last batch again if it `is_padded`.

    A run that resumes within an epoch loads the state of the loader or of its data set. If they have none, it reads
    again, and discards, what the epoch has trained on.

    Args:
        loader: The user's loader.
        rank: Rank of this process.
        seed: Seed, with rank and epoch, of the random numbers that the data set draws.
        kept: The `state` of a checkpoint; None for a run that does not resume within an epoch.
        epoch: Returns the current epoch.
        gather: Returns the values of all ranks.
        begin_gather: Begins to gather a row of each rank.

    Attributes:
        reader: Copy of the loader that reads.
        length: Number of batches of the rank that has the most; None if unknown.
        is_padded: Whether each rank needs a sample in each step.
        has_started: Whether `__iter__` was called.
        is_exhausted: Whether the data of all ranks has ended.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        rank: int,
        seed: int,
        kept: dict[str, Any] | None,
        epoch: Callable[[], int],
        gather: Callable[[Any], list[Any]],
        begin_gather: Callable[[Tensor], GatheredRows],
    ) -> None:
        self.reader, self._rank, self._seed, self._kept = copy.copy(loader), rank, seed, kept
        self._next_epoch, self._gather, self._begin_gather = epoch, gather, begin_gather
        self._seeds_workers = loader.generator is None
        if self._seeds_workers:
            vars(self.reader)["generator"] = torch.Generator()
        lengths = gather(sized_len(loader))
        self.length: int | None = None if None in lengths else max(lengths)
        self._world_size, self.is_padded, self.has_started, self._has_warned = len(lengths), False, False, False
        self._package = type(loader.dataset).__module__.partition(".")[0]
        # A data set of Hugging Face (datasets 5.2) that shuffles resumes without the samples in its buffer.
        is_iterable = isinstance(loader.dataset, IterableDataset)
        has_state = is_iterable and not loader.num_workers and self._package != "datasets"
        owners = (self.reader, loader.dataset)[: 1 + has_state]
        self._stateful: Any = next((owner for owner in owners if hasattr(owner, "load_state_dict")), None)
        self._source = _Source(loader.dataset)
        if self._stateful is loader.dataset:
            vars(self.reader)["dataset"] = self._source
        returns_batches = type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")
        if returns_batches and loader.batch_sampler is not None:
            vars(self.reader)["collate_fn"] = _CountingCollate(loader.collate_fn)
        self.is_exhausted, self._epoch, self._batches, self._untrained = False, 0, 0, kept
        self._state: Any = None
        """The state after the last batch that this rank has begun to train on."""
        self._read_ahead: deque[tuple[GatheredRows | None, int, Any]] = deque()
        """For each batch that is not trained on yet: samples of all ranks, number, and the state after it."""
        self._digests: list[str] | None = None if kept else []
        """Digests of the first batch of each loader process; None once the ranks have compared them."""

    @property
    def name(self) -> str:
        """Class of the data set."""
        return type(self._source.dataset).__name__

    def __iter__(self) -> Iterator[Any]:
        reader, kept, self._kept = self.reader, self._kept, None
        self._epoch, skipped = (kept["epoch"], kept["batches"]) if kept else (self._next_epoch(), 0)
        if not self.is_exhausted:  # otherwise the last batch of this pass may not be trained on yet
            self._read_ahead.clear()
        self.has_started, self.is_exhausted, self._batches = True, False, 0
        for each in (self._source.dataset, reader.sampler, getattr(reader.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(self._epoch)
        key = draw_key(self._seed, self._epoch, self._rank)
        if self._seeds_workers:
            torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws its seed like this
            reader.generator.manual_seed(key % 2**63)
        earlier, has_ended = skipped, False
        if kept and kept["states"] and self._stateful is not None:
            skipped, (state, has_ended) = 0, kept["states"][self._rank]
            if not has_ended:
                self._stateful.load_state_dict(state)
        if reader.num_workers:
            with blocked_signals():
                unread: Iterator[Any] = iter(reader)
        else:
            unread = self._read_with_seeds(key, earlier - skipped)
        if skipped:
            self._skip(unread, skipped)
        batches = self._read(unread, earlier, has_ended)
        if self.length is not None and self._world_size > 1:
            # Reads a batch ahead, so that the gather ends before its step; without a length, Lightning does this.
            return (batch for batch, _ in pairwise(chain(batches, [None])))
        return batches

    def _read(self, batches: Iterator[Any], earlier: int, has_ended: bool) -> Iterator[Any]:
        last = None
        for number in count(earlier + 1):
            batch = _END if has_ended else next(batches, _END)
            has_ended = batch is _END
            batch, samples = batch if isinstance(batch, _Counted) else (batch, self._samples_of(batch))
            samples *= batch is not None  # a collate function may return None
            rows = None
            if self._world_size > 1:
                # If the data set makes the batches, each counts the same.
                weight = samples if self.reader.batch_sampler is not None else samples > 0
                rows = self._begin_gather(torch.tensor([weight, samples, not has_ended]))
            if self._digests is not None:
                self._compare_first("" if has_ended else _digest(batch))
            if not samples:
                weights, _, continues = rows.wait().T if rows else _NO_OTHERS
                if has_ended and not continues.any():
                    self.is_exhausted = True
                    return
                if not weights.any():  # a collate function has returned None on all ranks that have data
                    yield None
                    continue
                batch = self._without_samples(last)
            else:
                last = batch
            state = None
            if self._stateful is not None:
                state = copy.deepcopy(self._stateful.state_dict()), has_ended or self._source.has_ended
            self._read_ahead.append((rows, number, state))
            yield batch

    @staticmethod
    def _samples_of(batch: Any) -> int:
        return 0 if batch is _END or batch is None else batch_size(batch) or 1

    def next_share(self) -> Share:
        """Returns this rank's share of the next batch, in the order in which batches were read."""
        if not self._read_ahead:
            return EVEN_SHARE
        rows, self._batches, self._state = self._read_ahead.popleft()
        self._untrained = None
        if rows is None:
            return EVEN_SHARE
        weights, samples, _ = rows.wait().T.tolist()
        weight = weights[self._rank] * self._world_size / sum(weights)
        return Share(samples[self._rank], sum(samples), weight, weight, not all(weights) and not self.is_padded)

    def state(self, is_within_epoch: bool) -> dict[str, Any]:
        """Returns what a resumed run needs. All ranks must call."""
        if is_within_epoch and self._untrained:
            return self._untrained
        batches = self._batches if is_within_epoch else 0
        states = self._gather(self._state) if batches and self._stateful is not None else []
        readers = [self._world_size, self.reader.num_workers]
        return {"epoch": self._epoch, "batches": batches, "states": states, "readers": readers}

    def _read_with_seeds(self, key: int, first: int) -> Iterator[Any]:
        """Reads batches in this process, from number `first` on.

        The generators are seeded for each batch, and then get their previous states back; not if the first batch draws
        no random number.
        """
        batches, draws = None, True
        for number in count(first):
            outer = generators.get_states()
            generators.seed((key + number * SEED_STEP) % 2**64)
            seeded = generators.get_states() if batches is None else None
            try:
                batches = iter(self.reader) if batches is None else batches
                batch = next(batches, _END)
                draws = seeded is None or generators.have_changed_since(seeded)
            finally:
                generators.set_states(outer)
            if batch is _END:
                return
            yield batch
            if not draws:
                yield from batches
                return

    def _skip(self, batches: Iterator[Any], number: int) -> None:
        began, text = monotonic(), f"{number:,} batches of {self.name} that epoch {self._epoch + 1} has already used"
        if self._rank == 0:
            print_notice(f"skipping {text} ...")
        for _ in range(number):
            if next(batches, _END) is _END:  # the data of this rank ended earlier than that of others
                break
        if self._rank == 0:
            print_notice(f"skipped {text} in {monotonic() - began:.1f} s")

    def _without_samples(self, last: Any) -> Any:
        """Returns the batch of a rank that has no sample left; `last` is its last batch, or None if it had none."""
        if not self.is_padded:
            return [] if last is None else empty_batch_like(last)
        if last is None:
            raise RunError(f"rank {self._rank} has no batch of {self.name}, but each process needs one")
        if not self._has_warned:
            self._has_warned = True
            found = f"{self.name} has fewer batches on some ranks, but each process needs a sample in each step"
            rank_zero_warn(f"rankzero: {found}: these ranks use their last batch more than once")
        return last

    def _compare_first(self, digest: str) -> None:
        """Warns if several loader processes read the same first batch. All ranks must call."""
        assert self._digests is not None
        self._digests.append(digest)
        workers = self.reader.num_workers
        if len(self._digests) < workers:
            return
        digests, self._digests = self._gather(self._digests), None
        readers: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(digests):
            for worker, each in enumerate(of_rank):
                readers.setdefault(each, []).append(f"rank {rank}" + f" (worker {worker})" * (workers > 1))
        readers.pop("", None)  # without data
        same = max(readers.values(), key=len, default=[])
        if len(same) > 1:
            otherwise = "in __iter__, itertools.islice(samples, rank * workers + worker, None, world_size * workers)"
            found = f"the first batch of {self.name} is the same on {few(same)}"
            advice = f"To divide the samples: {DIVISIONS.get(self._package, otherwise)}"
            rank_zero_warn(f"rankzero: {found}: all of them seem to read the same samples. {advice}")


class _Source:
    """Data set that records whether it is exhausted; its state may then already be that of the next epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.has_ended = dataset, False

    def __iter__(self) -> Iterator[Any]:
        self.has_ended = False
        yield from self.dataset
        self.has_ended = True


class _Counted(NamedTuple):
    """A batch and the number of samples that were collated."""

    batch: Any
    samples: int


class _CountingCollate:
    """Collate function that also returns how many samples it was given."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> _Counted:
        return _Counted(self.collate(samples), len(samples))


def _digest(batch: Any) -> str:
    """Returns a digest of the tensors, arrays, texts and numbers in a batch; an empty text if it has none."""
    leaves: list[bytes] = []

    def add(value: Any) -> None:
        if isinstance(value, Tensor | np.ndarray):
            with suppress(RuntimeError, TypeError, ValueError):  # sparse tensors, for example
                rows = torch.as_tensor(value).detach().cpu().reshape(-1).view(torch.uint8)[:DIGEST_BYTES]
                leaves.append(rows.numpy().tobytes())
        elif isinstance(value, str | bytes | int | float):
            leaves.append(repr(value).encode())
        elif isinstance(value, Mapping):
            add(list(value.values()))
        elif isinstance(value, list | tuple):
            for element in value:
                add(element)

    add(batch)
    return hashlib.blake2b(b"".join(leaves), digest_size=16).hexdigest() if leaves else ""
