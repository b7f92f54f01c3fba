"""Sample ledger: sums over the samples that an epoch has used and over those that it should have used."""

from collections.abc import Callable, Sequence

import numpy as np

from rankzero.sampling.permutation import Positions

POWERS = 4
"""Number of sums: the 0th to 3rd powers of the sample indices, each summed modulo 2^64.

The sums give the number of samples and do not depend on their order. A different multiset of the same size with the
same sums differs from 0 ... N-1 in at least four places, in a pattern that no accidental error produces (Prouhet,
Tarry and Escott)."""

_MODULUS = 2**64
_BLOCK = 1 << 16


class Ledger:
    """Sample ledger of one rank for one epoch. Its sums over all ranks do not depend on the world size.

    In a resumed run, it begins with the sums over samples used earlier in the epoch.
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
