"""The permutation is a bijection and as evenly mixed as a shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankzero.sampling.permutation import SMALL, Ledger, Permutation, epoch_key, expected_sums, sample_keys, sums_of_all

SHUFFLES = 2000


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.integers(0, 100), st.integers(0, 3))
@settings(max_examples=200)
def test_every_index_occurs_exactly_once(count, seed, epoch, pass_index):
    assert sorted(Permutation(count, seed, epoch, pass_index)(np.arange(count)).tolist()) == list(range(count))


@pytest.mark.parametrize("count", [SMALL - 1, SMALL, SMALL + 1, 999_983, 10**6])
def test_every_index_occurs_exactly_once_in_a_large_order(count):
    assert np.array_equal(np.sort(Permutation(count, 1, 2)(np.arange(count))), np.arange(count))


@given(st.integers(2**31, 10**12), st.integers(0, 2**32 - 1), st.data())
def test_a_window_of_a_huge_order_has_distinct_indices_in_range(count, seed, data):
    start = data.draw(st.integers(0, count - 1000))
    indices = Permutation(count, seed, 0)(np.arange(start, start + 1000))
    assert len(set(indices.tolist())) == 1000 and indices.min() >= 0 and indices.max() < count


def test_orders_differ_between_seeds_epochs_and_passes_and_are_reproducible_at_any_position():
    keys = [(0, 0), (0, 1), (1, 0), (0, 0, 1), (2**32, 0)]
    orders = [Permutation(1000, *key)(np.arange(1000)).tolist() for key in keys]
    assert all(first != second for i, first in enumerate(orders) for second in orders[:i])
    positions = np.array([[999, 0], [500, 500]])
    assert np.array_equal(Permutation(1000, 0, 0)(positions), np.array(orders[0])[positions])


def is_even(counts: np.ndarray, freedom: int) -> bool:
    """Returns whether counts vary as expected for equal probabilities (chi-square, five standard errors)."""
    mean = counts.sum() / counts.size
    chi_square = float(((counts - mean) ** 2 / mean).sum())
    return abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("count", [3, 5, 8, 10, 31, 64])
def test_small_orders_are_as_even_as_shuffles(count):
    shuffles = np.stack([Permutation(count, 5, epoch)(np.arange(count)) for epoch in range(SHUFFLES)])
    position_counts = np.stack([np.bincount(shuffles[:, position], minlength=count) for position in range(count)])
    assert is_even(position_counts, (count - 1) ** 2), "positions of a sample"
    steps = (shuffles[:, 1:] - shuffles[:, :-1]) % count
    assert is_even(np.bincount(steps.ravel(), minlength=count)[1:], count - 2), "differences of consecutive samples"
    pairs = np.bincount(shuffles[:, 0] * count + shuffles[:, -1], minlength=count**2).reshape(count, count)
    assert is_even(pairs[~np.eye(count, dtype=bool)], count * (count - 1) - 1), "first and last"


@pytest.mark.parametrize("count", [10_007, 100_003, 10**9])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_large_orders_are_as_even_as_shuffles(count, seed):
    length = min(count, 100_000)
    indices = Permutation(count, seed, 0)(np.arange(length)).astype(float)
    for lag in (1, 2, 32, 1000):
        correlation = np.corrcoef(indices[:-lag], indices[lag:])[0, 1]
        assert abs(correlation) < 5 / np.sqrt(length), "serial correlation"
    assert abs(np.corrcoef(indices, np.arange(length))[0, 1]) < 5 / np.sqrt(length)
    cells = np.histogram2d(np.arange(length), indices, bins=(20, 20), range=[[0, length], [0, count]])[0]
    assert is_even(cells, 19 * 19), "where samples stand"
    steps = (np.diff(indices) % count) / count
    assert is_even(np.histogram(steps, bins=50, range=(0, 1))[0], 49), "differences of consecutive samples"


def test_sample_keys_are_distinct_random_and_reproducible():
    samples = np.arange(100_000)
    keys = sample_keys(epoch_key(0, 0), samples)
    assert len(set(keys.tolist())) == len(samples)
    bits = np.unpackbits(keys.view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / np.sqrt(len(samples))
    other_keys = [sample_keys(epoch_key(0, 1), samples), sample_keys(epoch_key(1, 0), samples)]
    assert all(np.abs(np.corrcoef(keys.astype(float), compared.astype(float))[0, 1]) < 0.02 for compared in other_keys)
    assert np.array_equal(sample_keys(epoch_key(0, 0), samples[50:60]), keys[50:60])


def sums(samples):
    ledger = Ledger()
    for part in np.array_split(np.array(samples, dtype=np.int64), 3):
        ledger.use(part)
    return ledger.sums


@given(st.integers(8, 2000), st.integers(0, 9), st.data())
def test_the_sums_depend_on_each_sample_but_not_on_their_order(count, seed, data):
    """Not even two samples can be replaced by two with the same sum."""
    samples = list(range(count))
    assert sums(Permutation(count, seed, 0)(np.array(samples))) == sums_of_all(count)
    lost, repeated = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    assert sums([*samples[:lost], repeated, *samples[lost + 1 :]]) != sums_of_all(count)
    first = data.draw(st.integers(0, count - 4))
    samples[first : first + 4] = [first + 1, first + 1, first + 2, first + 2]
    assert sum(samples) == sum(range(count)) and sums(samples) != sums_of_all(count)


def test_sums_wrap_modulo_2_to_the_64():
    count = 10**9
    last_samples = list(range(count - 1000, count))
    powers = [sum(sample**power for sample in range(1000)) for power in range(4)]
    shifted = [sum(sample**power for sample in last_samples) % 2**64 for power in range(4)]
    assert sums(range(1000)) == powers and sums(last_samples) == shifted
    assert sums_of_all(count)[3] == (count * (count - 1) // 2) ** 2 % 2**64
    for few in range(1, 8):
        assert sums([*reversed(range(few))]) == sums_of_all(few)


@pytest.mark.parametrize("consumed", [0, 1, 400, 600, 999, 1000])
def test_a_ledger_continues_from_earlier_sums_and_the_expected_ones_are_those_of_the_first_part_of_an_order(consumed):
    order = Permutation(1000, 3, 4)
    earlier = expected_sums(order, 1000, consumed)
    assert earlier == sums(order(np.arange(consumed)))
    ledger = Ledger(earlier)
    ledger.use(np.array([4, 5]))
    assert ledger.sums == sums([*order(np.arange(consumed)), 4, 5])
