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


@given(st.integers(1, 2000), st.integers(0, 9))
def test_the_digest_of_all_samples_does_not_depend_on_their_order(count, seed):
    assert digest(Permutation(count, seed, 0)(np.arange(count))) == Digest.of_all(count)


def test_sums_wrap_modulo_2_to_the_64():
    count = 10**9
    last_samples = list(range(count - 1000, count))
    powers = [sum(sample**power for sample in range(1000)) for power in range(4)]
    shifted = [sum(sample**power for sample in last_samples) % 2**64 for power in range(4)]
    assert digest(range(1000)).sums == powers and digest(last_samples).sums == shifted
    assert Digest.of_all(count).sums[3] == (count * (count - 1) // 2) ** 2 % 2**64


@given(st.integers(8, 500), st.data())
def test_replacing_a_sample_or_two_samples_with_the_same_sum_changes_the_digest(count, data):
    samples = list(range(count))
    lost, repeated = data.draw(st.permutations(samples))[:2]
    assert digest([*samples[:lost], repeated, *samples[lost + 1 :]]) != Digest.of_all(count)
    first = data.draw(st.integers(0, count - 4))
    samples[first : first + 4] = [first + 1, first + 1, first + 2, first + 2]
    assert sum(samples) == sum(range(count)) and digest(samples) != Digest.of_all(count)


@pytest.mark.parametrize("consumed", [0, 1, 400, 600, 999, 1000])
def test_a_ledger_continues_from_an_earlier_digest_and_expected_is_that_of_the_first_part_of_an_order(consumed):
    order = Permutation(1000, 3, 4)
    earlier = expected_digest(order, 1000, consumed)
    assert earlier == digest(order(np.arange(consumed)))
    ledger = Ledger(Digest(earlier.sums))
    ledger.use(np.array([4, 5]))
    assert ledger.digest() == digest([*order(np.arange(consumed)), 4, 5])
