"""The samples of an evaluation, each once, dealt to ranks."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from rankzero.sampling.batch_sampler import Share
from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import epoch_key


class EvaluationBatchSampler(Sampler[Indices]):
    """A batch sampler: rank r of W has every W-th sample from the r-th, and as many batches as every other rank.

    Where the last batch would leave a rank without any, that rank keeps one sample back from the batch before, so that
    a module may talk to the other ranks in its step. Only a rank with fewer samples than batches gets empty ones.

    Args:
        count: Samples in the data set.
        batch_size: Samples a batch on each rank.
        rank: r.
        world_size: W.
        seed: Of what is drawn for each sample; the same in every epoch, so that evaluations can be compared.
        drop_last: Whether what does not fill a batch on every rank is left out.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        assert count >= 0 and batch_size > 0 and world_size > rank >= 0
        self.rank, self.world_size, self.batch_size, self.seed = rank, world_size, batch_size, seed
        in_full_batches = count // (batch_size * world_size) * batch_size * world_size
        self.count = in_full_batches if drop_last else count

    @property
    def first_batch(self) -> int:
        """An evaluation always begins at the beginning."""
        return 0

    def __len__(self) -> int:
        """Batches, the same on every rank."""
        return -(-self.count // (self.world_size * self.batch_size))

    def shares(self) -> Iterator[Share]:
        """What this rank has of each batch."""
        return map(self.share, range(len(self)))

    def share(self, batch: int) -> Share:
        """What this rank has of a batch."""
        more = self.count % self.world_size  # so many ranks, the first ones, have one sample more than the others
        mine, most, least = (self._end(batch, rank) - self._end(batch - 1, rank) for rank in (self.rank, 0, -1))
        total = more * most + (self.world_size - more) * least
        return Share(
            mine, total, loss_weight=1.0, metric_weight=mine * self.world_size / total, has_empty_rank=least == 0
        )

    def samples_until(self, batches: float) -> int:
        """Samples in so many of the first batches, on all ranks together."""
        return sum(self.share(batch).total for batch in range(int(min(batches, len(self)))))

    def _end(self, batch: int, rank: int) -> int:
        """How many of its samples a rank has had behind a batch; rank -1 is the last one."""
        samples = (self.count - rank % self.world_size + self.world_size - 1) // self.world_size
        to_come = len(self) - 1 - batch
        keeps_back = to_come if samples >= len(self) else 0
        return max(0, min((batch + 1) * self.batch_size, samples - keeps_back))

    def samples(self, batch: int) -> list[int]:
        """The samples of this rank in a batch."""
        numbers = np.arange(self._end(batch - 1, self.rank), self._end(batch, self.rank))
        samples: list[int] = (numbers * self.world_size + self.rank).tolist()
        return samples

    def __iter__(self) -> Iterator[Indices]:
        key = epoch_key(self.seed, 0)
        for batch in range(len(self)):
            yield Indices(self.samples(batch), key)
