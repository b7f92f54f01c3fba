"""Sample ledger: digests of the samples that an epoch has used and of those that it should have used."""

from collections.abc import Callable

import numpy as np

from rankzero.sampling.permutation import Positions

POWERS = 4
"""Number of sums: the 0th to 3rd powers of the sample indices, each summed modulo 2^64.

The sums give the number of samples and do not depend on their order. A different multiset of the same size with the
same sums differs from 0 ... N-1 in at least four places, in a pattern that no accidental error produces (Prouhet,
Tarry and Escott)."""

_MODULUS = 2**64
_BLOCK = 1 << 16


class Digest:
    """Sums of powers of sample indices, modulo 2^64.

    Args:
        sums: One sum per power; all 0 by default.
    """

    def __init__(self, sums: list[int] | None = None) -> None:
        self.sums = sums or [0] * POWERS

    @classmethod
    def of_all(cls, count: int) -> "Digest":
        """Returns the digest of 0, 1, ..., count - 1."""
        last = count - 1
        linear, squares = count * last // 2, last * count * (2 * last + 1) // 6
        return cls([total % _MODULUS for total in (count, linear, squares, linear**2)])

    def add(self, samples: Positions) -> None:
        """Adds samples to the sums."""
        numbers = samples.astype(np.uint64)
        power = np.ones_like(numbers)
        for exponent in range(POWERS):
            self.sums[exponent] = (self.sums[exponent] + int(power.sum(dtype=np.uint64))) % _MODULUS
            power = power * numbers

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest([(own - subtracted) % _MODULUS for own, subtracted in zip(self.sums, other.sums, strict=True)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self.sums == other.sums

    __hash__ = None  # type: ignore[assignment]


class Ledger:
    """Sample ledger of one rank for one epoch. The sum of all ranks' digests does not depend on the world size.

    Args:
        digest: Digest of samples used earlier in the epoch, for a resumed run.
    """

    def __init__(self, digest: Digest | None = None) -> None:
        self._digest = digest or Digest()
        self._pending: list[Positions] = []
        self._pending_samples = 0

    def use(self, samples: Positions) -> None:
        """Records samples that have been trained on; takes half a microsecond, because many are summed at a time."""
        self._pending.append(samples)
        self._pending_samples += samples.size
        if self._pending_samples > _BLOCK:
            self._sum_up()

    def _sum_up(self) -> None:
        self._digest.add(np.concatenate([np.empty(0, np.int64), *self._pending]))
        self._pending, self._pending_samples = [], 0

    def digest(self) -> Digest:
        """Returns the digest of all samples that this rank has used."""
        self._sum_up()
        return self._digest


def expected_digest(order: Callable[[Positions], Positions], count: int, consumed: int) -> Digest:
    """Returns the digest of the samples at the first `consumed` positions of an order of `count` samples."""
    is_second_half = consumed > count // 2
    digest = Digest()
    bounds = (consumed, count) if is_second_half else (0, consumed)
    for start in range(*bounds, _BLOCK):
        digest.add(order(np.arange(start, min(start + _BLOCK, bounds[1]))))
    return Digest.of_all(count) - digest if is_second_half else digest
