"""Sample indices of a batch, with the key of their epoch, as a batch sampler passes them to a DataLoader."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rankzero.sampling.permutation import sample_keys


class Indices(list[int]):
    """List of the sample indices of one batch on one rank. A data set can use it as a plain list.

    A data set that reads a whole batch (`__getitems__`) and draws random numbers for it can take them from
    `random_keys`. They then do not depend on the other samples in the batch.

    Args:
        samples: Sample indices.
        key: Key of the epoch, see `rankzero.sampling.permutation.epoch_key`.
        loader_indices: Indices of the samples in the loader's data set, if `samples` are indices into the source of a
            Subset.
    """

    def __init__(self, samples: Iterable[int] = (), key: int = 0, loader_indices: Sequence[int] | None = None) -> None:
        super().__init__(samples)
        self.key, self.loader_indices = key, loader_indices
        self._array: NDArray[np.int64] | None = None

    @classmethod
    def from_array(cls, samples: NDArray[np.int64], key: int) -> "Indices":
        """Returns the indices in an array, which must not be changed afterwards."""
        indices = cls(samples.tolist(), key)
        indices._array = samples
        return indices

    @property
    def array(self) -> NDArray[np.int64]:
        """The indices as an array, for a gather."""
        return np.asarray(self, dtype=np.int64) if self._array is None else self._array

    @property
    def random_keys(self) -> NDArray[np.uint64]:
        """64 random bits per sample, with shape `(len(self),)`."""
        return sample_keys(
            self.key, self.array if self.loader_indices is None else np.asarray(self.loader_indices, dtype=np.int64)
        )
