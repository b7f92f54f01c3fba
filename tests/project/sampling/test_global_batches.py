from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from project.sampling.global_batches import GlobalBatches

shapes = st.tuples(st.integers(1, 6), st.integers(1, 8), st.integers(0, 150)).map(
    lambda t: (t[0], t[0] * t[1], t[0] + t[2])  # world size, global batch size, count
)


def passes(world, size, count, **options):
    return [list(GlobalBatches(count, size, rank, world, **options)) for rank in range(world)]


@given(shapes, st.booleans(), st.integers(0, 2**32 - 1))
def test_evaluation_sees_each_sample_once_at_any_world_size(shape, shuffle, seed):
    world, size, count = shape
    drawn = [
        index for rank in passes(world, size, count, shuffle=shuffle, seed=seed) for batch in rank for index in batch
    ]
    assert sorted(drawn) == list(range(count))


@given(shapes, st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_training_draws_the_same_global_batches_at_any_world_size(shape, seed, epoch):
    world, size, count = shape

    def draw(ranks):
        samplers = [
            GlobalBatches(count, size, rank, ranks, shuffle=True, seed=seed, training=True) for rank in range(ranks)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [set().union(*map(set, shares)) for shares in zip_longest(*samplers, fillvalue=())]

    assert draw(world) == draw(1)
    assert set().union(*draw(world)) == set(range(count))


@given(shapes)
def test_in_training_every_rank_has_as_many_batches_and_none_is_empty(shape):
    world, size, count = shape
    ranks = passes(world, size, count, training=True)
    assert len({len(rank) for rank in ranks}) == 1
    assert all(batch for rank in ranks for batch in rank)


@given(shapes)
def test_no_sample_is_drawn_twice_but_where_a_rank_would_have_none(shape):
    world, size, count = shape
    tail = count % size
    drawn = sum(len(batch) for rank in passes(world, size, count, training=True) for batch in rank)
    assert drawn == count + (world - tail if 0 < tail < world else 0)


@given(shapes, st.booleans(), st.booleans())
def test_the_length_is_what_is_drawn(shape, training, drop_last):
    world, size, count = shape
    for rank in range(world):
        sampler = GlobalBatches(count, size, rank, world, training=training, drop_last=drop_last)
        assert len(sampler) == len(list(sampler))


@given(shapes)
def test_samples_in_a_batch_add_up(shape):
    _, size, count = shape
    sampler = GlobalBatches(count, size)
    assert sum(sampler.samples_in(batch) for batch in range(count // size + 2)) == count


def test_drop_last_drops_what_is_short():
    assert [len(batch) for batch in GlobalBatches(10, 4, drop_last=True)] == [4, 4]


def test_epochs_and_seeds_differ_and_repeat():
    def order(seed, epoch):
        sampler = GlobalBatches(50, 50, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return next(iter(sampler))

    assert order(0, 0) == order(0, 0) != order(0, 1) != order(1, 0) != order(0, 0)


@pytest.mark.parametrize("start", range(5))
def test_a_resumed_pass_goes_on_behind_what_was_drawn(start):
    whole = GlobalBatches(18, 4, shuffle=True, training=True)
    rest = GlobalBatches(18, 4, shuffle=True, training=True)
    rest.start = start
    assert list(rest) == list(whole)[start:] and len(rest) == len(whole)
    rest.set_epoch(1)
    assert rest.start == 0
