"""Deals the samples of an evaluation to ranks, each sample once."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from rankzero.sampling.batch_sampler import Share
from rankzero.sampling.drawn_order import DrawnOrder
from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import epoch_key


class EvaluationBatchSampler(Sampler[Indices]):
    """Batch sampler that gives rank r of W every W-th sample from the r-th, and all ranks the same number of batches.

    A rank that would have no sample left for the last batch keeps one back from the batch before. So a module can
    communicate with the other ranks in every step. Only a rank with fewer samples than batches gets empty batches.

    Args:
        count: Number of samples in the data set.
        batch_size: Samples per batch on each rank.
        rank: Rank r of this process.
        world_size: W, number of ranks.
        seed: Seed of the random numbers for each sample; the same in every epoch, so that evaluations are comparable.
        drop_last: Whether samples that do not fill a batch on every rank are omitted.
        drawn: The draws of a user's sampler, which are read in place of the samples 0, 1, 2, ...
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
        self.drawn = drawn
        assert count >= 0 and batch_size > 0 and world_size > rank >= 0
        self.rank, self.world_size, self.batch_size, self.seed = rank, world_size, batch_size, seed
        in_full_batches = count // (batch_size * world_size) * batch_size * world_size
        self.count = in_full_batches if drop_last else count

    def __len__(self) -> int:
        """Returns the number of batches, the same on every rank."""
        return -(-self.count // (self.world_size * self.batch_size))

    def shares(self) -> Iterator[Share]:
        """Returns this rank's share of each batch."""
        return map(self.share, range(len(self)))

    def share(self, batch: int) -> Share:
        """Returns this rank's share of a batch."""
        extra = self.count % self.world_size  # the first `extra` ranks have one sample more than the other ranks
        own, most, least = (self._end(batch, rank) - self._end(batch - 1, rank) for rank in (self.rank, 0, -1))
        total = extra * most + (self.world_size - extra) * least
        return Share(
            own, total, loss_weight=1.0, metric_weight=own * self.world_size / total, has_empty_rank=least == 0
        )

    def samples_until(self, batches: float) -> int:
        """Returns the number of samples in the first `batches` batches over all ranks."""
        return sum(self.share(batch).total for batch in range(int(min(batches, len(self)))))

    def _end(self, batch: int, rank: int) -> int:
        """Returns how many of its samples a rank has read after a batch; rank -1 is the last rank."""
        samples = (self.count - rank % self.world_size + self.world_size - 1) // self.world_size
        remaining_batches = len(self) - 1 - batch
        reserved_samples = remaining_batches if samples >= len(self) else 0
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
