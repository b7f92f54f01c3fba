import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.sampling.digest import Digest, Ledger, expected_digest
from rankzero.sampling.permutation import Permutation


def digest(samples):
    ledger = Ledger()
    for part in np.array_split(np.array(samples, dtype=np.int64), 3):
        ledger.use(part)
    return ledger.digest()


@given(st.integers(8, 2000), st.integers(0, 9), st.data())
def test_the_digest_depends_on_each_sample_but_not_on_their_order(count, seed, data):
    """Not even two samples can be replaced by two with the same sum."""
    samples = list(range(count))
    assert digest(Permutation(count, seed, 0)(np.array(samples))) == Digest.of_all(count)
    lost, repeated = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    assert digest([*samples[:lost], repeated, *samples[lost + 1 :]]) != Digest.of_all(count)
    first = data.draw(st.integers(0, count - 4))
    samples[first : first + 4] = [first + 1, first + 1, first + 2, first + 2]
    assert sum(samples) == sum(range(count)) and digest(samples) != Digest.of_all(count)


def test_sums_wrap_modulo_2_to_the_64():
    count = 10**9
    last_samples = list(range(count - 1000, count))
    powers = [sum(sample**power for sample in range(1000)) for power in range(4)]
    shifted = [sum(sample**power for sample in last_samples) % 2**64 for power in range(4)]
    assert digest(range(1000)).sums == powers and digest(last_samples).sums == shifted
    assert Digest.of_all(count).sums[3] == (count * (count - 1) // 2) ** 2 % 2**64
    for few in range(1, 8):
        assert digest([*reversed(range(few))]) == Digest.of_all(few)


@pytest.mark.parametrize("consumed", [0, 1, 400, 600, 999, 1000])
def test_a_ledger_continues_from_an_earlier_digest_and_expected_is_that_of_the_first_part_of_an_order(consumed):
    order = Permutation(1000, 3, 4)
    earlier = expected_digest(order, 1000, consumed)
    assert earlier == digest(order(np.arange(consumed)))
    ledger = Ledger(Digest(earlier.sums))
    ledger.use(np.array([4, 5]))
    assert ledger.digest() == digest([*order(np.arange(consumed)), 4, 5])
