"""What a batch sampler hands to a DataLoader: which samples, and in which epoch."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankzero.sampling.permutation import sample_keys


class Indices(list[int]):
    """The samples of one batch on one rank. To a data set it is a list like any other.

    A data set that reads a batch at once (`__getitems__`) and draws random numbers for it can take them from
    `random_keys`, so that they do not depend on which samples happen to be in the batch.

    Args:
        samples: Their numbers.
        key: Of the epoch, see `rankzero.sampling.permutation.epoch_key`.
        numbers: Their numbers in the whole data set, where this list is for a data set within it.
    """

    def __init__(self, samples: Iterable[int] = (), key: int = 0, numbers: Sequence[int] | None = None) -> None:
        super().__init__(samples)
        self.key, self.numbers = key, numbers
        self._array: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, samples: NDArray[np.int64], key: int) -> "Indices":
        """The samples of an array, which is not to be changed."""
        indices = cls(samples.tolist(), key)
        indices._array = samples
        return indices

    @property
    def array(self) -> NDArray[np.int64]:
        """The same numbers, to gather with."""
        return np.asarray(self, dtype=np.int64) if self._array is None else self._array

    @property
    def random_keys(self) -> NDArray[np.uint64]:
        """64 random bits for each sample, of shape `(len(self),)`."""
        return sample_keys(self.key, self.array if self.numbers is None else np.asarray(self.numbers, dtype=np.int64))
