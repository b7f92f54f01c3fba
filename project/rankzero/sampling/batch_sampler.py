"""Cuts the samples of an epoch or of an evaluation into batches, and deals them to the ranks."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from torch.utils.data import Sampler

from rankzero.sampling.drawn_order import DrawnOrder
from rankzero.sampling.permutation import Indices, Permutation, Positions, epoch_key

BLOCK = 4096
"""Approximate number of positions per look-up; each look-up has a fixed cost of some 50 microseconds."""

MANY_IN_FLIGHT = 512
"""Number of batches in flight above which those that have been trained on are removed."""


@dataclass(frozen=True)
class Position:
    """Progress of a run within its order of samples, independent of rank and world size.

    `step` and `samples` count the optimizer steps and the samples of this pass over the data. `pass_index` counts the
    earlier passes in this epoch, for a loader that repeats while a longer one continues.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    pass_index: int = 0


@dataclass(frozen=True)
class Share:
    """One rank's share of one micro-batch.

    Args:
        samples: Number of samples on this rank, of the `total` on all ranks.
        loss_weight: Factor for this rank's mean loss. After the plain average over ranks and micro-batches, the
            gradient equals the gradient of the mean loss over the global batch.
        metric_weight: Factor for this rank's mean of a metric. The plain average over ranks then equals the mean over
            the micro-batch.
        has_empty_rank: Whether some rank gets an empty batch.
    """

    samples: int
    total: int
    loss_weight: float
    metric_weight: float
    has_empty_rank: bool

    @property
    def is_empty(self) -> bool:
        return self.has_empty_rank and not self.samples


EVEN_SHARE = Share(samples=1, total=1, loss_weight=1.0, metric_weight=1.0, has_empty_rank=False)
"""Share of a rank that has as many samples as every other rank."""


class ElasticBatchSampler(Sampler[Indices]):
    """Batch sampler whose step t takes positions t*G to (t+1)*G of the epoch's order, at any world size.

    Rank r of W gets every W-th of these positions, from the r-th, in micro-batches that fit a device. No sample is
    repeated or omitted, so the last step may be short and leave ranks without samples; if G < W, every step does. Such
    ranks get empty batches, so that all ranks have the same number of batches. A short step is dealt to fewer ranks if
    it would otherwise give a rank a single sample.

    Args:
        global_batch_size: G, samples per optimizer step over all ranks.
        micro_batches: Minimum number of micro-batches into which a rank's share of a step is divided.
        shuffle: Whether the order is a random permutation drawn from `(seed, epoch)` instead of 0, 1, 2, ...
        seed: Seed of the permutation and of the random numbers for each sample.
        start: Position from which a resumed run continues.
        drawn: The draws of a user's sampler, which are read in place of the samples 0, 1, 2, ...

    Attributes:
        micro_batches: Batches per optimizer step; the last step may have fewer.
        in_flight: Samples of each batch that has been read and not been removed by `on_many_in_flight`.
        on_many_in_flight: Called when a batch is read with more than `MANY_IN_FLIGHT` in flight. Removes batches that
            have been trained on.
        is_padded: Whether a rank without samples in a step reads one of the step's samples with weight 0. Required by
            features that need a sample on every rank.
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
        drawn: DrawnOrder | None = None,
    ) -> None:
        assert count > 0 and global_batch_size > 0 and world_size > rank >= 0
        self.count, self.global_batch_size, self.rank, self.world_size = count, global_batch_size, rank, world_size
        self.largest_share = -(-global_batch_size // world_size)
        size = -(-self.largest_share // micro_batches)
        self.device_batch_size = min(size, max_device_batch_size or size)
        self.micro_batches = -(-self.largest_share // self.device_batch_size)
        self.shuffle, self.seed, self.drop_last, self.drawn = shuffle, seed, drop_last, drawn
        self.is_padded = self.has_started = self._is_exhausted = False
        self.in_flight: deque[Positions] = deque()
        self.on_many_in_flight: Callable[[], None] = self._forget_in_flight
        self._shares_by_size: dict[tuple[int, bool], list[Share]] = {}
        self.start_position = start or Position()
        self.epoch = self.start_position.epoch

    def _forget_in_flight(self) -> None:
        self.in_flight.clear()

    @property
    def sampler(self) -> "ElasticBatchSampler":
        """This sampler itself, because Lightning calls `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Moves to the beginning of another epoch; does nothing for the current one."""
        if epoch != self.epoch:
            self.epoch, self._is_exhausted = epoch, False
            self.start_position = Position(epoch)

    @property
    def counts_batches(self) -> bool:
        """Whether a user's batch sampler decides the batches, so that `count` is their number."""
        return self.drawn is not None and self.drawn.draws_batches

    @property
    def has_changed_batch_size(self) -> bool:
        """Whether this epoch began with another global batch size, and so has another number of steps."""
        return self.start_position.samples != self.start_position.step * self.global_batch_size

    @property
    def steps(self) -> int:
        """Optimizer steps in this epoch."""
        full_steps, remainder = divmod(self.count - self.start_position.samples, self.global_batch_size)
        return self.start_position.step + full_steps + (remainder > 0 and not self.drop_last)

    @property
    def first_batch(self) -> int:
        """Index of this epoch's first batch to read; above 0 only for a run that resumed in the middle of the epoch."""
        return self.start_position.step * self.micro_batches

    @property
    def batches_of_earlier_passes(self) -> int:
        """Batches in earlier passes of this epoch, for a loader that repeats."""
        return self.start_position.pass_index and self.start_position.pass_index * len(self)

    def __len__(self) -> int:
        """Returns the number of batches in this epoch, the same on every rank."""
        if self.steps <= self.start_position.step:
            return self.first_batch
        return (self.steps - 1) * self.micro_batches + len(self._shares(self._size(self.steps - 1)))

    def order(self) -> Callable[[Positions], Positions]:
        """Returns the order of this epoch, as a function from positions to samples."""
        if not self.shuffle:
            return np.copy
        return Permutation(self.count, self.seed, self.epoch, self.start_position.pass_index)

    def consumed(self, batches: int) -> int:
        """Returns the number of samples in the first `batches` batches of this epoch, also in the middle of a step."""
        step, micro_batches = divmod(batches, self.micro_batches)
        if batches >= len(self) or not micro_batches:
            return self.position(batches).samples
        size = self._size(step)
        return self._first_position(step) + min(size, micro_batches * self.device_batch_size * self._active_ranks(size))

    def position(self, batches: int, ends_step: bool = False) -> Position:
        """Returns the position after the last complete step within the first `batches` batches of this epoch.

        With `ends_step`, the last of these batches ends a step, even if the step has fewer batches than others.
        """
        step = batches // self.micro_batches if batches < len(self) else self.steps
        samples = min(self.count, self._first_position(step))
        if ends_step and (consumed := self.consumed(batches)) > samples:
            step, samples = step + 1, consumed
        return Position(self.epoch, step, samples, self.start_position.pass_index)

    def shares(self) -> Iterator[Share]:
        """Returns this rank's share of each batch of this pass, from the start position to the end."""
        full_steps = max(0, (self.count - self.start_position.samples) // self.global_batch_size)
        full = chain.from_iterable(repeat(self._shares(self.global_batch_size), full_steps))
        first_short_step = self.start_position.step + full_steps
        return chain(full, self._shares(self._size(first_short_step)) if first_short_step < self.steps else ())

    def _sizes(self) -> list[int]:
        """Returns the sizes of steps that occur: the global batch size, and that of a short last step."""
        full_steps, remainder = divmod(self.count, self.global_batch_size)
        return [self.global_batch_size] * (full_steps > 0) + [remainder] * (remainder > 0 and not self.drop_last)

    def has_empty_batches(self) -> bool:
        """Returns whether some batch of an epoch is empty on some rank."""
        return any(share.has_empty_rank for size in self._sizes() for share in self._shares(size))

    def has_single_samples(self) -> bool:
        """Returns whether some batch of an epoch has a single sample on some rank."""
        if self.counts_batches:
            return False
        device = self.device_batch_size
        shares = [divmod(size, self._active_ranks(size)) for size in self._sizes()]
        return any(1 % device in (least % device, (least + (rest > 0)) % device) for least, rest in shares)

    def samples_in(self, batch: int) -> int:
        """Returns the samples of a batch over all ranks; `batch` is its index over all passes of the epoch."""
        step, micro_batch = divmod(batch - self.batches_of_earlier_passes, self.micro_batches)
        size = self._size(step)
        if step < 0 or size <= 0 or (self.drop_last and size < self.global_batch_size):
            return 0
        shares = self._shares(size)
        return shares[micro_batch].total if micro_batch < len(shares) else 0

    def _first_position(self, step: int) -> int:
        return self.start_position.samples + (step - self.start_position.step) * self.global_batch_size

    def _size(self, step: int) -> int:
        return min(self.global_batch_size, self.count - self._first_position(step))

    def _shares(self, size: int) -> list[Share]:
        """Returns this rank's share of each micro-batch of a step with `size` samples."""
        shares = self._shares_by_size.get((size, self.is_padded))
        if shares is None:
            device, world, active = self.device_batch_size, self.world_size, self._active_ranks(size)
            samples_per_rank = [(size - rank + active - 1) // active if rank < active else 0 for rank in range(world)]
            shares = []
            for offset in range(0, samples_per_rank[0], device):
                counts = [min(device, max(0, samples - offset)) for samples in samples_per_rank]
                own_weight, total = counts[self.rank] * world, sum(counts)
                has_empty_rank = not all(counts) and not self.is_padded
                loss_weight = own_weight * self.micro_batches / size
                shares.append(Share(counts[self.rank], total, loss_weight, own_weight / total, has_empty_rank))
            self._shares_by_size[size, self.is_padded] = shares
        return shares

    def _active_ranks(self, size: int) -> int:
        """Returns how many ranks get samples of a step; fewer of a short step, so that none gets a single sample."""
        if self.is_padded or size >= min(2 * self.world_size, self.global_batch_size):
            return self.world_size
        return max(1, size // 2, -(-size // self.largest_share))

    def __iter__(self) -> Iterator[Indices]:
        key, batches, drawn = epoch_key(self.seed, self.epoch), self.arrays(), self.drawn
        if drawn:
            return (drawn.indices(positions, key) for positions in batches)
        return (Indices.from_array(samples, key) for samples in batches)

    def arrays(self) -> Iterator[Positions]:
        """Returns the samples of each batch of this rank: the batches of `__iter__`, as arrays. All ranks must call."""
        if self._is_exhausted:
            self._is_exhausted = False
            self.start_position = Position(self.epoch, pass_index=self.start_position.pass_index + 1)
        self.has_started = True
        if self.drawn:
            self.drawn.draw(self.count, self.seed, self.epoch, self.start_position.pass_index)
        self.in_flight = deque()
        return self._batches(self.in_flight)

    def _batches(self, in_flight: deque[Positions]) -> Iterator[Positions]:
        order = self.order()
        full_size = self.global_batch_size if self.micro_batches == 1 and not self.is_padded else 0
        for first, size, row in self._rows(order):
            if len(in_flight) > MANY_IN_FLIGHT:
                self.on_many_in_flight()
            if size == full_size:
                in_flight.append(row)
                yield row
                continue
            for micro_batch in range(len(self._shares(size))):
                samples = row[micro_batch * self.device_batch_size : (micro_batch + 1) * self.device_batch_size]
                in_flight.append(samples)
                if self.is_padded and not samples.size:
                    samples = order(np.array([first + self.rank % size]))
                yield samples
        self._is_exhausted = True

    def _rows(self, order: Callable[[Positions], Positions]) -> Iterator[tuple[int, int, Positions]]:
        """Yields the first position, the size and this rank's samples of each step."""
        size, own_positions = self.global_batch_size, self._own_positions(self.global_batch_size)
        first_short_step = self.start_position.step + (self.count - self.start_position.samples) // size
        block = max(1, BLOCK // max(1, own_positions.size))
        for step in range(self.start_position.step, first_short_step, block):
            first_positions = self._first_position(step) + size * np.arange(min(block, first_short_step - step))
            rows = order(first_positions[:, None] + own_positions)
            for first, row in zip(first_positions.tolist(), rows, strict=True):
                yield first, size, row
        if first_short_step < self.steps:
            first, size = self._first_position(first_short_step), self._size(first_short_step)
            yield first, size, order(first + self._own_positions(size))

    def _own_positions(self, size: int) -> Positions:
        """Returns this rank's positions within a step of `size` samples."""
        active_ranks = self._active_ranks(size)
        return np.arange(self.rank, size if self.rank < active_ranks else 0, active_ranks)


class EvaluationBatchSampler(Sampler[Indices]):
    """Batch sampler that gives rank r of W every W-th sample from the r-th, and all ranks the same number of batches.

    A rank that would have no sample left for the last batch keeps one back from the batch before. So a module can
    communicate with the other ranks in every step. Only a rank with fewer samples than batches gets empty batches.

    The random numbers for each sample are the same in every epoch, so that evaluations are comparable. With
    `drop_last`, samples that do not fill a batch on every rank are omitted. The other arguments are those of
    `ElasticBatchSampler`, except `batch_size`, the samples per batch on each rank.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        drawn: DrawnOrder | None = None,
    ) -> None:
        assert count >= 0 and batch_size > 0 and world_size > rank >= 0
        self.rank, self.world_size, self.batch_size, self.seed, self.drawn = rank, world_size, batch_size, seed, drawn
        self.count = count - count % (batch_size * world_size) if drop_last else count

    def __len__(self) -> int:
        """Returns the number of batches, the same on every rank."""
        return -(-self.count // (self.world_size * self.batch_size))

    def shares(self) -> Iterator[Share]:
        return map(self.share, range(len(self)))

    def share(self, batch: int) -> Share:
        extra = self.count % self.world_size  # the first `extra` ranks have one sample more than the other ranks
        own, most, least = (self._end(batch, rank) - self._end(batch - 1, rank) for rank in (self.rank, 0, -1))
        total = extra * most + (self.world_size - extra) * least
        return Share(own, total, 1.0, metric_weight=own * self.world_size / total, has_empty_rank=least == 0)

    def samples_until(self, batches: float) -> int:
        """Returns the number of samples in the first `batches` batches over all ranks."""
        return sum(self.share(batch).total for batch in range(int(min(batches, len(self)))))

    def _end(self, batch: int, rank: int) -> int:
        """Returns how many of its samples a rank has read after a batch; rank -1 is the last rank."""
        samples = (self.count - rank % self.world_size + self.world_size - 1) // self.world_size
        reserved_samples = len(self) - 1 - batch if samples >= len(self) else 0  # one for each remaining batch
        return max(0, min((batch + 1) * self.batch_size, samples - reserved_samples))

    def samples(self, batch: int) -> list[int]:
        """Returns this rank's sample indices in a batch."""
        return list(self._indices(batch, 0))

    def _indices(self, batch: int, key: int) -> Indices:
        numbers = np.arange(self._end(batch - 1, self.rank), self._end(batch, self.rank))
        positions = numbers * self.world_size + self.rank
        return self.drawn.indices(positions, key) if self.drawn else Indices.from_array(positions, key)

    def __iter__(self) -> Iterator[Indices]:
        key = epoch_key(self.seed, 0)
        if self.drawn:
            self.drawn.draw(self.count, self.seed, 0, 0)
        for batch in range(len(self)):
            yield self._indices(batch, key)
