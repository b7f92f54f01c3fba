import pickle

import numpy as np
import pytest
from torch.utils.data import Subset

from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import epoch_key, sample_keys

KEY = epoch_key(seed=3, epoch=2)


def of_array(samples):
    return Indices.from_array(np.array(samples, dtype=np.int64), KEY)


def of_list(samples):
    return Indices(samples, KEY)


@pytest.mark.parametrize("make", [of_list, of_array])
@pytest.mark.parametrize("samples", [[], [0], [5, 2, 9], list(range(1000))])
def test_indices_are_a_list_of_plain_integers_with_a_key_for_each_sample(make, samples):
    indices = make(samples)
    assert isinstance(indices, list) and indices == samples and len(indices) == len(samples)
    assert all(type(index) is int for index in indices)
    assert [*indices, 1] == [*samples, 1] and bool(indices) == bool(samples)
    assert indices.array.dtype == np.int64 and indices.array.tolist() == samples
    assert indices.random_keys.dtype == np.uint64 and indices.random_keys.shape == (len(samples),)
    assert np.array_equal(indices.random_keys, sample_keys(KEY, np.array(samples, dtype=np.int64)))


def test_the_key_of_a_sample_depends_only_on_seed_epoch_and_index_in_the_loaders_data_set():
    first, second = of_list([5, 2, 9]).random_keys, of_array([9, 5]).random_keys
    assert first[2] == second[0] and first[0] == second[1] and len({*first.tolist()}) == 3
    for key in (epoch_key(seed=3, epoch=1), epoch_key(seed=4, epoch=2)):
        assert not {*Indices([5, 2, 9], key).random_keys.tolist()} & {*first.tolist()}
    of_subset = Indices([70, 71], KEY, loader_indices=[5, 9])
    assert of_subset == [70, 71] and of_subset.array.tolist() == [70, 71]
    assert np.array_equal(of_subset.random_keys, of_list([5, 9]).random_keys)
    for empty in (Indices([], KEY, loader_indices=[]), Indices()):
        assert empty == [] and empty.array.shape == empty.random_keys.shape == (0,)


def test_indices_keep_their_keys_when_pickled_for_a_loader_process_and_are_used_like_a_list():
    for indices in (of_list([5, 2]), of_array([5, 2]), Indices([7, 8], KEY, loader_indices=[5, 2])):
        copy = pickle.loads(pickle.dumps(indices))
        assert type(copy) is Indices and copy == indices and copy.key == KEY
        assert np.array_equal(copy.random_keys, of_list([5, 2]).random_keys)
    assert Subset(list("abcdefghij"), range(10)).__getitems__(of_array([5, 2])) == ["f", "c"]
    assert np.arange(10)[of_list([5, 2])].tolist() == [5, 2]
