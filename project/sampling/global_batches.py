"""The order of the samples of one epoch, cut into global batches and shared among ranks."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler: global batch t is positions t*G to (t+1)*G of the epoch's order, at any number of ranks.

    Rank r of W takes every W-th position from the r-th, so that all ranks together draw the same samples in the same
    batches, however many they are. No sample is repeated or left out; the last batch may be short.

    In training every rank has as many batches as the others. Where the last batch holds fewer samples than there are
    ranks, the ranks that would get none draw one of its samples once more.

    Args:
        count: Samples in the data set.
        global_batch_size: G, samples a step over all ranks.
        rank: r.
        world_size: W.
        shuffle: Whether the order is a random permutation, drawn from `(seed, epoch)`, or 0, 1, 2, ...
        seed: Of the permutation.
        training: Whether ranks have to keep step; in evaluation a rank with nothing left is done.
        drop_last: Whether a last batch that is short is left out.
    """

    def __init__(
        self,
        count: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        training: bool = False,
        drop_last: bool = False,
    ) -> None:
        assert count > 0 and global_batch_size >= world_size > rank >= 0
        self.count, self.global_batch_size = count, global_batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.training, self.drop_last = training, drop_last
        self.epoch = 0
        self.start = 0
        """The batch at which the next pass begins, for a run that is resumed within an epoch."""

    @property
    def sampler(self) -> "GlobalBatches":
        """Where Lightning looks for `set_epoch`: at `batch_sampler.sampler`."""
        return self

    @property
    def batch_size(self) -> int:
        """Samples a step on each rank."""
        return self.global_batch_size // self.world_size

    @property
    def description(self) -> dict[str, int]:
        """What the order is made of; free of ranks."""
        return {"count": self.count, "global_batch_size": self.global_batch_size, "seed": self.seed}

    def set_epoch(self, epoch: int) -> None:
        """Turns to another epoch, at its beginning."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def samples_in(self, batch: int) -> int:
        """How many samples global batch number `batch` holds."""
        return max(0, min(self.global_batch_size, self.count - batch * self.global_batch_size))

    def __len__(self) -> int:
        """Batches that this rank draws in an epoch."""
        whole, rest = divmod(self.count, self.global_batch_size)
        if self.drop_last:
            return whole
        return whole + (rest > (0 if self.training else self.rank))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for batch in range(self.start, len(self)):
            first, length = batch * self.global_batch_size, self.samples_in(batch)
            share = torch.arange(min(self.rank, self.rank % length), length, self.world_size) + first
            yield (share if order is None else order[share]).tolist()

    def _order(self) -> Tensor | None:
        if not self.shuffle:
            return None
        # Not torch's generator: of a seed that holds two numbers it uses the lower 32 bits alone.
        return torch.from_numpy(np.random.default_rng([self.seed, self.epoch]).permutation(self.count))
