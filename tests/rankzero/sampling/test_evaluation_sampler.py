from hypothesis import given
from hypothesis import strategies as st

from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler

worlds, sizes, counts = st.integers(1, 6), st.integers(1, 12), st.integers(0, 150)


def ranks(world, count, size, **settings):
    return [EvaluationBatchSampler(count, size, rank, world, **settings) for rank in range(world)]


@given(worlds, counts, sizes)
def test_every_sample_is_evaluated_exactly_once_in_the_same_number_of_batches_on_all_ranks(world, count, size):
    samplers = ranks(world, count, size)
    batches = [list(sampler) for sampler in samplers]
    assert sorted(i for of_rank in batches for batch in of_rank for i in batch) == list(range(count))
    assert all(len(batch) <= size for of_rank in batches for batch in of_rank)
    assert {len(of_rank) for of_rank in batches} == {len(samplers[0])}
    assert all(batch for of_rank in batches for batch in of_rank) or count < world or size == 1


@given(worlds, counts, sizes)
def test_shares_state_which_batches_are_empty_on_some_rank(world, count, size):
    samplers = ranks(world, count, size)
    for number, batches in enumerate(zip(*samplers, strict=True)):
        shares = [sampler.share(number) for sampler in samplers]
        assert [share.has_empty_rank for share in shares] == [not all(batches)] * world
        assert [share.samples for share in shares] == [len(batch) for batch in batches]
        assert {share.total for share in shares} == {sum(map(len, batches))}
        assert batches[0], "rank zero always has something"


@given(worlds, counts, sizes)
def test_drop_last_keeps_only_full_batches(world, count, size):
    samplers = ranks(world, count, size, drop_last=True)
    assert all(len(batch) == size for sampler in samplers for batch in sampler)
    assert len(samplers[0]) == count // (world * size)
