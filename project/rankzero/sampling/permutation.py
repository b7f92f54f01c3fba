"""Random order of 0, 1, ..., N-1, any part of which can be computed without the rest, and the ledger of its samples."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

SMALL = 2**16
ROUNDS, ROUNDS_WHEN_SMALL = 12, 24
"""Fewer rounds mix measurably worse than a shuffle: with 8, neighbors among 9 samples show it in 20,000 epochs."""

_ORDER, _SAMPLES, _DRAWS = 0, 1, 2
"""Purpose of a random number stream, part of its seed, so that no two streams coincide."""


class Permutation:
    """Permutation of `range(count)` drawn from `(seed, epoch)`, as a function from positions to indices.

    A Feistel network permutes the numbers `left * width + right` of a nearly square rectangle with at least `count`
    numbers. A result outside `range(count)` is permuted again until it is inside ("cycle walking"; Black and Rogaway
    2002, Ciphers with Arbitrary Finite Domains). The permutation needs no memory, whatever the count.

    `count` is from 1 to 10^12 and beyond. A loader that repeats while a longer one continues counts its passes within
    the epoch in `pass_index`, from 0.
    """

    def __init__(self, count: int, seed: int, epoch: int, pass_index: int = 0) -> None:
        assert count > 0
        self.count = count
        self.height = math.isqrt(count - 1) + 1
        self.width = -(-count // self.height)
        rounds = ROUNDS_WHEN_SMALL if count < SMALL else ROUNDS
        seed_sequence = np.random.SeedSequence([_ORDER, seed, epoch, pass_index])
        self._keys = seed_sequence.generate_state(rounds, np.uint64)

    def __call__(self, positions: Positions) -> Positions:
        """Returns the indices at `positions`, in the same shape; takes tens of nanoseconds per position."""
        indices = self._permute_once(positions.astype(np.uint64).ravel())
        while (out_of_range := np.flatnonzero(indices >= self.count)).size:
            indices[out_of_range] = self._permute_once(indices[out_of_range])
        return indices.astype(np.int64).reshape(positions.shape)

    def _permute_once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        sizes = np.uint64(self.height), np.uint64(self.width)
        left, right = np.divmod(numbers, sizes[1])
        buffer = np.empty_like(right)
        for round_index, key in enumerate(self._keys):
            size = sizes[round_index % 2]
            mixed = right + key
            mixed *= _MULTIPLIERS[0]
            mixed ^= np.right_shift(mixed, _32, out=buffer)
            mixed *= _MULTIPLIERS[1]
            mixed >>= _32  # 32 random bits ...
            mixed *= size
            mixed >>= _32  # ... become a number below `size` (Lemire 2019, without a division)
            mixed += left
            # Subtracts `size` from sums of at least `size`; for smaller sums the difference wraps around and is larger.
            np.minimum(mixed, np.subtract(mixed, size, out=buffer), out=mixed)
            left, right = right, mixed
        left *= sizes[1]
        left += right
        return left


def epoch_key(seed: int, epoch: int) -> int:
    """Returns the key from which `sample_keys` derives the random bits of each sample in an epoch."""
    return int(np.random.SeedSequence([_SAMPLES, seed, epoch]).generate_state(1, np.uint64)[0])


def draw_key(seed: int, epoch: int, pass_index: int) -> int:
    """Returns the key that seeds the generators while a user's sampler draws a pass over the data."""
    return int(np.random.SeedSequence([_DRAWS, seed, epoch, pass_index]).generate_state(1, np.uint64)[0])


def sample_keys(key: int, indices: Positions) -> NDArray[np.uint64]:
    """Returns 64 random bits for each sample, the same in every worker, process and attempt that reads this epoch."""
    bits: NDArray[np.uint64] = indices.astype(np.uint64) * _MULTIPLIERS[0] + np.uint64(key)
    for multiplier in _MULTIPLIERS:
        bits ^= bits >> _32
        bits *= multiplier
    bits ^= bits >> _32
    return bits


_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
"""Odd numbers with well-spread bits: from the golden ratio, and found by search (Mulvey 2016)."""


class Indices(list[int]):
    """List of the sample indices of one batch on one rank. A data set can use it as a plain list.

    A data set that reads a whole batch (`__getitems__`) and draws random numbers for it can take them from
    `random_keys`. They then do not depend on the other samples in the batch.

    Attributes:
        key: The `epoch_key`.
        loader_indices: The indices in the loader's data set, if the list has those in the source of a Subset.
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
        indices = self.loader_indices
        return sample_keys(self.key, self.array if indices is None else np.asarray(indices, dtype=np.int64))


POWERS = 4
"""Number of sums: the 0th to 3rd powers of the sample indices, each summed modulo 2^64.

The sums give the number of samples and do not depend on their order. A different multiset of the same size with the
same sums differs from 0 ... N-1 in at least four places, in a pattern that no accidental error produces (Prouhet,
Tarry and Escott)."""

_MODULUS = 2**64
_BLOCK = 1 << 16


class Ledger:
    """Sample ledger of one rank for one epoch: sums over the samples that it has used.

    The sums over all ranks do not depend on the world size. In a resumed run, the ledger begins with the sums over
    samples used earlier in the epoch.
    """

    def __init__(self, sums: Sequence[int] = (0,) * POWERS) -> None:
        self._sums = list(sums)
        self._pending: list[Positions] = []
        self._pending_samples = 0

    def use(self, samples: Positions) -> None:
        """Records samples that have been trained on; takes half a microsecond, because many are summed at a time."""
        self._pending.append(samples)
        self._pending_samples += samples.size
        if self._pending_samples > _BLOCK:
            self._sum_up()

    def _sum_up(self) -> None:
        numbers = np.concatenate([np.empty(0, np.int64), *self._pending]).astype(np.uint64)
        power = np.ones_like(numbers)
        for exponent in range(POWERS):
            self._sums[exponent] = (self._sums[exponent] + int(power.sum(dtype=np.uint64))) % _MODULUS
            power = power * numbers
        self._pending, self._pending_samples = [], 0

    @property
    def sums(self) -> list[int]:
        """One sum per power over all samples that this rank has used."""
        self._sum_up()
        return list(self._sums)


def sums_of_all(count: int) -> list[int]:
    """Returns the sums over 0, 1, ..., count - 1."""
    last = count - 1
    linear, squares = count * last // 2, last * count * (2 * last + 1) // 6
    return [total % _MODULUS for total in (count, linear, squares, linear**2)]


def expected_sums(order: Callable[[Positions], Positions], count: int, consumed: int) -> list[int]:
    """Returns the sums over the samples at the first `consumed` positions of an order of `count` samples."""
    is_second_half = consumed > count // 2
    bounds = (consumed, count) if is_second_half else (0, consumed)
    ledger = Ledger()
    for start in range(*bounds, _BLOCK):
        ledger.use(order(np.arange(start, min(start + _BLOCK, bounds[1]))))
    if not is_second_half:
        return ledger.sums
    return [(total - unused) % _MODULUS for total, unused in zip(sums_of_all(count), ledger.sums, strict=True)]
