from hypothesis import given
from hypothesis import strategies as st

from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler

worlds, sizes, counts = st.integers(1, 6), st.integers(1, 12), st.integers(0, 150)


def ranks(world, count, size, **settings):
    return [EvaluationBatchSampler(count, size, rank, world, **settings) for rank in range(world)]


@given(worlds, counts, sizes)
def test_every_sample_is_evaluated_exactly_once_in_as_many_batches_on_all_ranks_or_in_full_ones(world, count, size):
    samplers = ranks(world, count, size)
    batches_of = [list(sampler) for sampler in samplers]
    assert sorted(i for batches in batches_of for batch in batches for i in batch) == list(range(count))
    assert all(len(batch) <= size for batches in batches_of for batch in batches)
    assert {len(batches) for batches in batches_of} == {len(samplers[0])}
    assert all(batch for batches in batches_of for batch in batches) or count < world or size == 1
    for number, batches in enumerate(zip(*batches_of, strict=True)):
        shares = [sampler.share(number) for sampler in samplers]
        assert [share.has_empty_rank for share in shares] == [not all(batches)] * world
        assert [share.samples for share in shares] == [len(batch) for batch in batches]
        assert {share.total for share in shares} == {sum(map(len, batches))}
        assert batches[0], "rank zero always has something"
    full = ranks(world, count, size, drop_last=True)
    assert all(len(batch) == size for sampler in full for batch in sampler) and len(full[0]) == count // (world * size)
