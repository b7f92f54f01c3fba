"""What a batch sampler hands to a DataLoader: which samples, and in which epoch."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from project.sampling.permutation import sample_keys


class Indices(list[int]):
    """The samples of one batch on one rank. To a data set it is a list like any other.

    A data set that reads a batch at once (`__getitems__`) and draws random numbers for it can take them from
    `random_keys`, so that they do not depend on which samples happen to be in the batch.

    Args:
        samples: Their numbers.
        key: Of the epoch, see `project.sampling.permutation.epoch_key`.
    """

    def __init__(self, samples: Iterable[int] = (), key: int = 0) -> None:
        super().__init__(samples)
        self.key = key

    @property
    def random_keys(self) -> NDArray[np.uint64]:
        """64 random bits for each sample, of shape `(len(self),)`."""
        return sample_keys(self.key, np.asarray(self, dtype=np.int64))
