from hypothesis import given
from hypothesis import strategies as st

from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler

worlds, sizes, counts = st.integers(1, 6), st.integers(1, 12), st.integers(0, 150)


def ranks(world, count, size, **settings):
    return [EvaluationBatchSampler(count, size, rank, world, **settings) for rank in range(world)]


@given(worlds, counts, sizes)
def test_every_sample_is_evaluated_exactly_once(world, count, size):
    samplers = ranks(world, count, size)
    assert sorted(i for sampler in samplers for batch in sampler for i in batch) == list(range(count))
    assert all(len(batch) <= size for sampler in samplers for batch in sampler)


@given(worlds, counts, sizes)
def test_every_rank_has_the_same_number_of_batches(world, count, size):
    samplers = ranks(world, count, size)
    assert {len(list(sampler)) for sampler in samplers} == {len(samplers[0])}


@given(worlds, counts, sizes)
def test_shares_state_which_batches_are_empty_on_some_rank(world, count, size):
    samplers = ranks(world, count, size)
    for number, batches in enumerate(zip(*samplers, strict=True)):
        shares = [sampler.share(number) for sampler in samplers]
        assert [share.has_empty_rank for share in shares] == [not all(batches)] * world
        assert [share.samples for share in shares] == [len(batch) for batch in batches]
        assert {share.total for share in shares} == {sum(map(len, batches))}
        assert batches[0], "rank zero always has something"


@given(worlds, counts, st.integers(2, 12))
def test_no_batch_is_empty_if_there_are_at_least_as_many_samples_as_ranks(world, count, size):
    if count >= world:
        assert all(batch for sampler in ranks(world, count, size) for batch in sampler)


@given(worlds, counts, sizes)
def test_drop_last_keeps_only_full_batches(world, count, size):
    samplers = ranks(world, count, size, drop_last=True)
    assert all(len(batch) == size for sampler in samplers for batch in sampler)
    assert len(samplers[0]) == count // (world * size)
