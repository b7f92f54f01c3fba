"""The ledger: what an epoch has really used, held against what it should have."""

from collections.abc import Callable

import numpy as np

from rankzero.sampling.permutation import Positions

POWERS = 4
"""Of the samples' numbers their 0th to 3rd powers are summed, modulo 2^64: how many there were, and a digest that does
not depend on their order. A multiset of as many numbers that has the same sums differs from 0 ... N-1 in four places
or more, and in a pattern that no slip makes (Prouhet, Tarry and Escott)."""

_MODULUS = 2**64
_BLOCK = 1 << 16


class Digest:
    """Sums of powers of sample numbers, modulo 2^64.

    Args:
        sums: One a power.
    """

    def __init__(self, sums: list[int] | None = None) -> None:
        self.sums = sums or [0] * POWERS

    @classmethod
    def of_all(cls, count: int) -> "Digest":
        """Of 0, 1, ..., count - 1."""
        last = count - 1
        ones, squares = count * last // 2, last * count * (2 * last + 1) // 6
        return cls([total % _MODULUS for total in (count, ones, squares, ones**2)])

    def add(self, samples: Positions) -> None:
        """Adds some samples."""
        numbers = samples.astype(np.uint64)
        power = np.ones_like(numbers)
        for place in range(POWERS):
            self.sums[place] = (self.sums[place] + int(power.sum(dtype=np.uint64))) % _MODULUS
            power = power * numbers

    def __sub__(self, other: "Digest") -> "Digest":
        return Digest([(own - others) % _MODULUS for own, others in zip(self.sums, other.sums, strict=True)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self.sums == other.sums

    __hash__ = None  # type: ignore[assignment]


class Ledger:
    """Sums up what this rank has used of an epoch. Free of ranks once the ranks' sums are added up.

    Args:
        digest: What was used before.
    """

    def __init__(self, digest: Digest | None = None) -> None:
        self._digest = digest or Digest()
        self._waiting: list[Positions] = []
        self._waiting_samples = 0

    def use(self, samples: Positions) -> None:
        """Notes samples that have been trained on; half a microsecond, since they are summed up many at a time."""
        self._waiting.append(samples)
        self._waiting_samples += samples.size
        if self._waiting_samples > _BLOCK:
            self._sum_up()

    def _sum_up(self) -> None:
        self._digest.add(np.concatenate([np.empty(0, np.int64), *self._waiting]))
        self._waiting, self._waiting_samples = [], 0

    def digest(self) -> Digest:
        """Of all that this rank has used."""
        self._sum_up()
        return self._digest


def expected(order: Callable[[Positions], Positions], count: int, consumed: int) -> Digest:
    """The digest of the first `consumed` positions of an order of `count` samples, each once."""
    behind = consumed > count // 2
    rest = Digest()
    ends = (consumed, count) if behind else (0, consumed)
    for start in range(*ends, _BLOCK):
        rest.add(order(np.arange(start, min(start + _BLOCK, ends[1]))))
    return Digest.of_all(count) - rest if behind else rest
