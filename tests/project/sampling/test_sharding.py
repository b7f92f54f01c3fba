import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from project.errors import RequestError
from project.sampling.sharding import Sharding

DATA = TensorDataset(torch.arange(100))


def drawn(loader):
    return [batch[0].tolist() for batch in loader]


def test_the_runs_order_takes_the_place_of_the_loaders():
    ranks = [Sharding(rank, 3).apply(DataLoader(DATA, batch_size=8, shuffle=True), training=True) for rank in range(3)]
    batches = [drawn(loader) for loader in ranks]
    assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(100))
    assert all(len(batch) == 8 for rank in batches for batch in rank[:-1])


def test_what_else_the_loader_has_stays():
    def collate(samples):
        return [torch.stack([sample[0] for sample in samples])]

    class Loader(DataLoader):
        def __init__(self, data, name, **options):
            super().__init__(data, **options)
            self.name = name

    from lightning.fabric.utilities.data import _replace_dunder_methods

    with _replace_dunder_methods(DataLoader, "dataset"):  # Lightning makes loaders so
        loader = Loader(DATA, "mine", batch_size=8, collate_fn=collate, num_workers=1, persistent_workers=True)
    ours = Sharding(0, 2).apply(loader, training=False)
    assert type(ours) is Loader and ours.name == "mine" and ours.collate_fn is collate
    assert ours.num_workers == 1 and ours.persistent_workers


def test_not_shuffled_means_in_order():
    assert drawn(Sharding().apply(DataLoader(DATA, batch_size=50), training=True)) == [[*range(50)], [*range(50, 100)]]


@pytest.mark.parametrize(
    ("sharding", "size"),
    [
        (Sharding(0, 2), 16),
        (Sharding(0, 2, batch_size=5), 10),
        (Sharding(0, 2, global_batch_size=30), 30),
        (Sharding(0, 1, global_batch_size=30), 30),
    ],
)
def test_the_global_batch_size(sharding, size):
    sharding.apply(DataLoader(DATA, batch_size=8, shuffle=True), training=True)
    assert sharding.training.global_batch_size == size


def test_arguments_by_place(monkeypatch):
    from lightning.fabric.utilities.data import _replace_dunder_methods

    with _replace_dunder_methods(DataLoader, "dataset"):
        loader = DataLoader(DATA, 32, True)
    assert sorted(index for batch in drawn(Sharding().apply(loader, training=True)) for index in batch) == [*range(100)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "whose"),
    [
        (DataLoader(Stream()), "the iterable dataset Stream"),
        (DataLoader(DATA, sampler=SubsetRandomSampler(range(5))), "the sampler SubsetRandomSampler"),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), "the batch sampler list"),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, False)), "the batch sampler BatchSampler"),
        (DataLoader(DATA, batch_size=None), "a loader without batches"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "the sampler RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=7)), "a sampler that draws a part"),
        ([1, 2, 3], "a list"),
    ],
)
def test_an_order_of_ones_own_is_left_alone_with_a_warning(loader, whose):
    with pytest.warns(UserWarning, match=f"{whose}.*not promised"):
        assert Sharding().apply(loader, training=True) is loader


@pytest.mark.parametrize(
    ("sharding", "asked", "instead"),
    [
        (Sharding(batch_size=101), "--batch_size 101", "--batch_size 100, or less"),
        (
            Sharding(0, 2, batch_size=51),
            "--batch_size 51 on each of 2 processes, 102 in all",
            "--batch_size 50, or less",
        ),
        (Sharding(0, 2, global_batch_size=102), "--global_batch_size 102", "--global_batch_size 100, or less"),
        (Sharding(0, 2, global_batch_size=7), "--global_batch_size 7", "--global_batch_size 6"),
        (Sharding(0, 101), "101 processes", "--devices 100"),
    ],
)
def test_batches_that_cannot_be(sharding, asked, instead):
    with pytest.raises(RequestError) as error:
        sharding.apply(DataLoader(DATA, batch_size=8), training=True)
    assert (error.value.asked, error.value.instead) == (asked, instead)


def test_batches_of_which_none_is_whole():
    with pytest.raises(RequestError, match="100 training samples"):
        Sharding(0, 2).apply(DataLoader(DATA, batch_size=64, drop_last=True), training=True)


def test_a_run_that_is_carried_on_has_the_samples_it_began_with():
    with pytest.raises(RequestError, match="began with 90"):
        Sharding(expected_count=90).apply(DataLoader(DATA, batch_size=8), training=True)


def test_a_users_own_batch_may_be_larger_than_the_data():
    assert drawn(Sharding().apply(DataLoader(DATA, batch_size=512), training=True)) == [list(range(100))]
