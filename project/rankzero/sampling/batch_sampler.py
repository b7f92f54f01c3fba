"""The training samples of one epoch: cut into global batches, dealt to ranks, read in micro-batches."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from torch.utils.data import Sampler

from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import Permutation, Positions, epoch_key

BLOCK = 4096
"""About so many positions are looked up at a time: a look-up costs some 50 microseconds beside what it costs each."""

MANY_IN_FLIGHT = 512
"""Batches. With more of them in flight, those that have been trained on are taken out."""


@dataclass(frozen=True)
class Position:
    """How far a run has come. Free of ranks.

    Args:
        epoch: The epoch, from 0.
        step: Optimiser steps of it that are done.
        samples: Samples of it that are consumed.
        pass_index: Rounds of it that are done, for a loader that goes round while a longer one goes on.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    pass_index: int = 0


@dataclass(frozen=True)
class Share:
    """What one rank has of one micro-batch.

    Args:
        samples: Of this rank.
        total: Of all ranks.
        loss_weight: By what this rank's mean loss is multiplied, so that the gradient, which is averaged over ranks and
            micro-batches alike, is that of the mean over the global batch.
        metric_weight: By what a mean of this rank is multiplied, so that the mean over ranks is that of the
            micro-batch.
        has_empty_rank: Whether some rank gets an empty batch.
    """

    samples: int
    total: int
    loss_weight: float
    metric_weight: float
    has_empty_rank: bool

    @property
    def is_empty(self) -> bool:
        """Whether this rank gets an empty batch."""
        return self.has_empty_rank and not self.samples


EVEN = Share(samples=1, total=1, loss_weight=1.0, metric_weight=1.0, has_empty_rank=False)
"""What a rank has that has as much as any other one."""


class ElasticBatchSampler(Sampler[Indices]):
    """A batch sampler: step t of an epoch takes positions t*G to (t+1)*G of the epoch's order, at any world size.

    Rank r of W has every W-th of them from the r-th, in micro-batches that a device can hold. No sample is repeated or
    left out: the last step may be short, and some ranks may have nothing in it, or, where G < W, in any. They then get
    an empty batch, so that all ranks have as many batches. Where a short step would give a rank a single sample, it is
    dealt to fewer ranks.

    Args:
        count: N, samples in the data set.
        global_batch_size: G, samples an optimiser step over all ranks.
        rank: r.
        world_size: W.
        micro_batches: Into how many batches a rank's share is divided at least.
        max_device_batch_size: The largest batch that a device can hold, if there is a limit.
        shuffle: Whether the order is a random permutation, drawn by `(seed, epoch)`, or 0, 1, 2, ...
        seed: Of the permutation, and of what is drawn for each sample.
        drop_last: Whether a last step that is short is left out.
        start: Where to begin, for a run that is carried on.

    Attributes:
        micro_batches: Batches an optimiser step; the last step may have fewer.
        in_flight: Samples of the batches that have been read, but for those that `on_many_in_flight` has taken out.
        on_many_in_flight: Called while batches are read and more than `MANY_IN_FLIGHT` are in flight, to take out
            those that have been trained on.
        padded: Whether a rank without samples in a step draws one of the step's samples, with no weight, for what
            needs a sample on every rank.
    """

    def __init__(
        self,
        count: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        micro_batches: int = 1,
        max_device_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        start: Position | None = None,
    ) -> None:
        assert count > 0 and global_batch_size > 0 and world_size > rank >= 0
        self.count, self.global_batch_size = count, global_batch_size
        self.rank, self.world_size = rank, world_size
        self.largest_share = -(-global_batch_size // world_size)
        size = -(-self.largest_share // micro_batches)
        self.device_batch_size = min(size, max_device_batch_size or size)
        self.micro_batches = -(-self.largest_share // self.device_batch_size)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.padded = self.begun = self._exhausted = False
        self.in_flight: deque[Positions] = deque()
        self.on_many_in_flight: Callable[[], None] = lambda: self.in_flight.clear()
        self._dealt: dict[tuple[int, bool], list[Share]] = {}
        self.start_position = start or Position()
        self.epoch = self.start_position.epoch

    @property
    def sampler(self) -> "ElasticBatchSampler":
        """Where Lightning looks for `set_epoch`: at `batch_sampler.sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Turns to another epoch, at its beginning."""
        if epoch != self.epoch:
            self.epoch, self._exhausted = epoch, False
            self.start_position = Position(epoch)

    @property
    def is_patched(self) -> bool:
        """Whether this epoch has another number of steps than others: it began with another global batch."""
        return self.start_position.samples != self.start_position.step * self.global_batch_size

    @property
    def steps(self) -> int:
        """Optimiser steps in this epoch."""
        full_steps, rest = divmod(self.count - self.start_position.samples, self.global_batch_size)
        return self.start_position.step + full_steps + (rest > 0 and not self.drop_last)

    @property
    def first_batch(self) -> int:
        """The batch at which this epoch begins; 0 but for a run that is carried on within it."""
        return self.start_position.step * self.micro_batches

    @property
    def pass_began_at(self) -> int:
        """Batches of the epoch in earlier rounds, for a loader that goes round."""
        return self.start_position.pass_index and self.start_position.pass_index * len(self)

    def __len__(self) -> int:
        """Batches in this epoch, the same on every rank."""
        if self.steps <= self.start_position.step:
            return self.first_batch
        return (self.steps - 1) * self.micro_batches + len(self._shares(self._size(self.steps - 1)))

    def order(self) -> Callable[[Positions], Positions]:
        """The order of this epoch: from positions to samples."""
        if not self.shuffle:
            return np.copy
        return Permutation(self.count, self.seed, self.epoch, self.start_position.pass_index)

    def consumed(self, batches: int) -> int:
        """Samples of this epoch's order that are used behind so many batches, also within a step."""
        step, micro_batches = divmod(batches, self.micro_batches)
        if batches >= len(self) or not micro_batches:
            return self.position(batches).samples
        size = self._size(step)
        return self._first(step) + min(size, micro_batches * self.device_batch_size * self._active_ranks(size))

    def position(self, batches: int) -> Position:
        """Where the run is behind the last step that is done after so many batches of this epoch."""
        step = batches // self.micro_batches if batches < len(self) else self.steps
        return Position(self.epoch, step, min(self.count, self._first(step)), self.start_position.pass_index)

    def shares(self) -> Iterator[Share]:
        """What this rank has of each batch of this pass, from the first to the last."""
        full_steps = max(0, (self.count - self.start_position.samples) // self.global_batch_size)
        full = chain.from_iterable(repeat(self._shares(self.global_batch_size), full_steps))
        first_short_step = self.start_position.step + full_steps
        return chain(full, self._shares(self._size(first_short_step)) if first_short_step < self.steps else ())

    def _sizes(self) -> list[int]:
        """The sizes of the steps there are: whole ones, and a short one."""
        full_steps, rest = divmod(self.count, self.global_batch_size)
        return [self.global_batch_size] * (full_steps > 0) + [rest] * (rest > 0 and not self.drop_last)

    def leaves_idle(self) -> bool:
        """Whether in some step some rank has nothing, or would have if it were not given a sample once more."""
        device = self.device_batch_size
        for size in self._sizes():
            active_ranks = self._active_ranks(size)
            most, least = -(-size // active_ranks), size // active_ranks if active_ranks == self.world_size else 0
            if least <= (most - 1) // device * device:
                return True
        return False

    def leaves_single(self) -> bool:
        """Whether in some step some rank reads a single sample."""
        single = 1 % self.device_batch_size
        for size in self._sizes():
            least, most = size // self._active_ranks(size), -(-size // self._active_ranks(size))
            if single in (least % self.device_batch_size, most % self.device_batch_size):
                return True
        return False

    def samples_in(self, batch: int) -> int:
        """Samples in a batch over all ranks, counted through all rounds of the epoch."""
        step, micro_batch = divmod(batch - self.pass_began_at, self.micro_batches)
        size = self._size(step)
        if step < 0 or size <= 0 or (self.drop_last and size < self.global_batch_size):
            return 0
        shares = self._shares(size)
        return shares[micro_batch].total if micro_batch < len(shares) else 0

    def _first(self, step: int) -> int:
        origin = self.start_position
        return origin.samples + (step - origin.step) * self.global_batch_size

    def _size(self, step: int) -> int:
        return min(self.global_batch_size, self.count - self._first(step))

    def _shares(self, size: int) -> list[Share]:
        """How a step of `size` samples is dealt to this rank, a micro-batch at a time."""
        shares = self._dealt.get((size, self.padded))
        if shares is None:
            device, world, active = self.device_batch_size, self.world_size, self._active_ranks(size)
            of_rank = [(size - rank + active - 1) // active if rank < active else 0 for rank in range(world)]
            shares = []
            for done in range(0, of_rank[0], device):
                dealt = [min(device, max(0, samples - done)) for samples in of_rank]
                own, total = dealt[self.rank] * world, sum(dealt)
                idle = not all(dealt) and not self.padded
                shares.append(Share(dealt[self.rank], total, own * self.micro_batches / size, own / total, idle))
            self._dealt[size, self.padded] = shares
        return shares

    def _active_ranks(self, size: int) -> int:
        """Among how many ranks a step is dealt: all, or, of a short one, so many that none gets a single sample.

        Batch norm cannot do with a single one.
        """
        if self.padded or size >= min(2 * self.world_size, self.global_batch_size):
            return self.world_size
        return max(1, size // 2, -(-size // self.largest_share))

    def __iter__(self) -> Iterator[Indices]:
        key = epoch_key(self.seed, self.epoch)
        return (Indices.of(drawn, key) for drawn in self.arrays())

    def arrays(self) -> Iterator[Positions]:
        """The samples of each batch of this rank; what comes of `__iter__`, as arrays."""
        if self._exhausted:
            self._exhausted = False
            self.start_position = Position(self.epoch, pass_index=self.start_position.pass_index + 1)
        self.begun = True
        self.in_flight = deque()
        return self._batches(self.in_flight)

    def _batches(self, given: deque[Positions]) -> Iterator[Positions]:
        order = self.order()
        full_size = self.global_batch_size if self.micro_batches == 1 and not self.padded else 0
        for first, size, row in self._rows(order):
            if len(given) > MANY_IN_FLIGHT:
                self.on_many_in_flight()
            if size == full_size:
                given.append(row)
                yield row
                continue
            for number in range(len(self._shares(size))):
                drawn = row[number * self.device_batch_size : (number + 1) * self.device_batch_size]
                given.append(drawn)
                if self.padded and not drawn.size:
                    drawn = order(np.array([first + self.rank % size]))
                yield drawn
        self._exhausted = True

    def _rows(self, order: Callable[[Positions], Positions]) -> Iterator[tuple[int, int, Positions]]:
        """For each step its first position, its size, and the samples of this rank."""
        size, own_places = self.global_batch_size, self._share_of(self.global_batch_size)
        first_short_step = self.start_position.step + (self.count - self.start_position.samples) // size
        block = max(1, BLOCK // max(1, own_places.size))
        for step in range(self.start_position.step, first_short_step, block):
            firsts = self._first(step) + size * np.arange(min(block, first_short_step - step))
            for first, row in zip(firsts.tolist(), order(firsts[:, None] + own_places), strict=True):
                yield first, size, row
        if first_short_step < self.steps:
            first, size = self._first(first_short_step), self._size(first_short_step)
            yield first, size, order(first + self._share_of(size))

    def _share_of(self, size: int) -> Positions:
        """The places within a step that are this rank's."""
        active_ranks = self._active_ranks(size)
        return np.arange(self.rank, size if self.rank < active_ranks else 0, active_ranks)
