"""The random numbers of a sample depend only on seed, epoch and sample."""

import pickle
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import Dataset, Subset, TensorDataset

from rankzero.sampling import generators
from rankzero.sampling.permutation import Indices, sample_keys
from rankzero.sampling.seeded_dataset import SeededDataset
from running import restore_process_state


class Drawing(Dataset):
    """Data set that draws from the generators of torch, Python and NumPy."""

    def __init__(self, draws=lambda index: True):
        self.draws, self.indices_read = draws, []

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.indices_read.append(index)
        if not self.draws(index):
            return index
        return index, torch.rand(1).item(), random.random(), np.random.rand(), np.random.randn()


class DrawingInBatches(Drawing):
    def __getitems__(self, indices):
        self.indices_read.append(list(indices))
        return torch.rand(len(indices)) if self.draws(indices) else torch.tensor(indices)


def indices(*samples, key=5):
    return Indices(samples, key)


def test_indices_are_plain_integers_with_the_keys_of_their_samples_also_in_a_loader_process():
    samples = np.array([5, 2, 9])
    for found in (Indices.from_array(samples, 7), pickle.loads(pickle.dumps(indices(5, 2, 9, key=7)))):
        assert found == [5, 2, 9] and {type(index) for index in found} == {int}
        assert found.array.dtype == np.int64 and np.array_equal(found.array, samples)
        assert np.array_equal(found.random_keys, sample_keys(7, samples))


def test_a_sample_is_the_same_in_any_batch_and_another_with_another_key():
    dataset = SeededDataset(Drawing())
    samples = dict(zip(range(10), dataset.__getitems__(indices(*range(10))), strict=True))
    for order in ([3], [9, 3, 4], [4, 3]):
        assert SeededDataset(Drawing()).__getitems__(indices(*order)) == [samples[i] for i in order]
        assert dataset.__getitems__(indices(*order)) == [samples[i] for i in order]
    assert len({value for _, *values in samples.values() for value in values}) == 40
    assert dataset.__getitems__(indices(1, key=1)) != dataset.__getitems__(indices(1, key=2))
    assert dataset.__getitems__(indices()) is None


def test_reading_does_not_change_the_generators_of_the_process():
    generators.seed(1)
    undisturbed = [draw() for _ in range(3)]
    for data in (Drawing(), Drawing(lambda index: index > 50), Drawing(lambda index: False), DrawingInBatches()):
        dataset = SeededDataset(data)
        generators.seed(1)
        found = []
        for start in (0, 40, 60):
            dataset.__getitems__(indices(*range(start, start + 4)))
            found.append(draw())
        assert found == undisturbed


def test_a_data_set_is_read_once_and_unseeded_until_a_batch_with_the_first_draw_which_is_read_again(monkeypatch):
    data = Drawing(lambda index: index == 7)
    dataset = SeededDataset(data)
    with monkeypatch.context() as patch:
        dataset.__getitems__(indices(1, 2))
        patch.setattr(generators, "seed", lambda key: pytest.fail("seeded"))
        assert dataset.__getitems__(indices(3, 4)) == [3, 4] and data.indices_read == [1, 2, 3, 4]
    expected = SeededDataset(Drawing(lambda index: index == 7)).__getitems__(indices(6, 7))
    assert dataset.__getitems__(indices(6, 7)) == expected
    assert data.indices_read == [1, 2, 3, 4, 6, 7, 6, 7]
    dataset.__getitems__(indices(8))
    assert data.indices_read[-1:] == [8] and dataset._draws


def test_a_subset_is_read_like_its_data_set_and_one_with_getitems_one_batch_at_a_time():
    subset = Subset(Drawing(), [9, 8, 7, 6])
    for data in (subset, Subset(subset, [0, 1, 2, 3])):
        samples = SeededDataset(data).__getitems__(indices(0, 1, 2, 3))
        assert [sample for sample, *_ in samples] == [9, 8, 7, 6]
        assert SeededDataset(data).__getitems__(indices(2)) == samples[2:3]
    data = DrawingInBatches()
    found = [SeededDataset(data).__getitems__(indices(1, 2, 3)) for _ in range(2)]
    assert data.indices_read == [[1, 2, 3]] * 2 and torch.equal(*found)
    assert not torch.equal(found[0], SeededDataset(data).__getitems__(indices(4, 5, 6)))


class Keyed(DrawingInBatches):
    draws_from_keys = True

    def __getitems__(self, indices):
        return list(indices), indices.random_keys.tolist()


def test_data_sets_that_draw_from_keys_and_pickled_tensor_data_sets_are_not_checked_for_draws(monkeypatch):
    monkeypatch.setattr(generators, "get_states", lambda: pytest.fail("watched"))
    (_, first), (_, second) = (SeededDataset(Keyed()).__getitems__(indices(*samples)) for samples in ([1, 2], [2, 9]))
    assert first[1] == second[0]
    samples, keys = SeededDataset(Subset(Keyed(), [9, 8, 7])).__getitems__(indices(2, 0))
    assert samples == [7, 9] and keys == indices(2, 0).random_keys.tolist()
    copy = pickle.loads(pickle.dumps(SeededDataset(data := TensorDataset(torch.arange(5)))))
    assert len(copy) == 5 and torch.equal(copy.tensors[0], data.tensors[0])
    assert copy.__getitems__(indices(3)) == [(torch.tensor(3),)]


DRAWS = (
    {"python": random.random, "python, integers": lambda: random.randrange(10)}
    | {"python, shuffle": lambda: random.shuffle([1, 2, 3]), "python, normal": lambda: random.gauss(0, 1)}
    | {"python, seed": lambda: random.seed(2), "python, a whole block": lambda: random.getrandbits(32 * 624)}
    | {"numpy": np.random.rand, "numpy, integers": lambda: np.random.randint(10), "numpy, normal": np.random.randn}
    | {"numpy, seed": lambda: np.random.seed(2), "numpy, a whole block": lambda: np.random.bytes(4 * 624)}
    | {"torch": lambda: torch.rand(1), "torch, normal": lambda: torch.randn(1)}
    | {"torch, permutation": lambda: torch.randperm(3), "torch, seed": lambda: torch.manual_seed(2)}
)
"""After a whole block of 624 words, a Mersenne twister is at the same position in another block."""


@pytest.fixture(autouse=True)
def seeded():
    """Seeds all generators, which clears cached normal numbers, and restores their states afterwards."""
    states = generators.get_states()
    generators.seed(1)
    yield
    generators.set_states(states)


def draw_normal():
    return np.random.randn(), random.gauss(0, 1)  # each caches a second number, which the next call returns


def draw(count=1):
    return [
        (random.random(), random.getrandbits(70), np.random.rand(), torch.rand(2).tolist(), draw_normal())
        for _ in range(count)
    ]


def test_the_global_seed_is_that_of_lightnings_last_seed_everything(monkeypatch):
    with restore_process_state():
        for last_seed in (3, 5):
            seed_everything(last_seed, verbose=False)
            assert generators.global_seed() == last_seed
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert generators.global_seed() is None


BEFORE = {"after a seed": lambda: None, "within a block": lambda: draw(2), "with cached normal numbers": draw_normal}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_detected_and_can_be_undone(name, before):
    BEFORE[before]()
    state = generators.get_states()
    expected = draw(3)
    generators.set_states(state)
    DRAWS[name]()
    assert generators.have_changed_since(state)
    generators.set_states(state)
    assert not generators.have_changed_since(state) and draw(3) == expected


def test_the_next_draw_differs_after_a_draw_from_any_generator_on_any_default_device():
    with torch.device("meta"):
        generators.seed(3)
        first = generators.draw()
        generators.seed(3)
        assert generators.draw() == first
    for draw_one in (random.random, np.random.standard_normal, lambda: torch.randn(())):
        generators.seed(3)
        draw_one()
        assert generators.draw() != first
