from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.sampling.batch_sampler import MANY_IN_FLIGHT, ElasticBatchSampler, EvaluationBatchSampler, Position

worlds = st.integers(1, 6)
sizes = st.integers(1, 40)
counts = st.integers(1, 200)
limits = st.one_of(st.none(), st.integers(1, 9))


def ranks(world, count, size, epoch=0, **settings):
    samplers = [ElasticBatchSampler(count, size, rank, world, shuffle=True, **settings) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def steps(samplers):
    """Returns the sorted samples of each optimizer step over all ranks."""
    found = [[] for _ in range(samplers[0].steps)]
    for number, batches in enumerate(zip(*samplers, strict=True)):
        found[number // samplers[0].micro_batches] += [i for batch in batches for i in batch]
    return [sorted(step) for step in found]


@given(worlds, counts, sizes, limits, st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_the_steps_are_the_same_at_any_world_size(world, count, size, limit, seed, epoch):
    found = steps(ranks(world, count, size, epoch, seed=seed, max_device_batch_size=limit))
    assert found == steps(ranks(1, count, size, epoch, seed=seed))
    assert sorted(i for step in found for i in step) == list(range(count))
    assert all(len(step) == size for step in found[:-1])


@given(worlds, counts, sizes, limits, st.integers(1, 4))
def test_all_ranks_have_equally_many_batches_within_the_device_limit_as_their_shares_state(
    world, count, size, limit, micro_batches
):
    samplers = ranks(world, count, size, max_device_batch_size=limit, micro_batches=micro_batches)
    batches_of, shares_of = [list(sampler) for sampler in samplers], [list(sampler.shares()) for sampler in samplers]
    assert {len(batches) for batches in batches_of} == {len(samplers[0])}
    assert limit is None or max(len(batch) for batches in batches_of for batch in batches) <= limit
    for shares, batches in zip(zip(*shares_of, strict=True), zip(*batches_of, strict=True), strict=True):
        assert [share.samples for share in shares] == [len(batch) for batch in batches]
        assert {share.total for share in shares} == {sum(map(len, batches))}
        assert {share.has_empty_rank for share in shares} == {not all(batches)}
        assert sum(share.metric_weight for share in shares) == pytest.approx(world)
    assert sum(samplers[0].samples_in(batch) for batch in range(len(samplers[0]) + 3)) == count


@given(worlds, counts, sizes, limits, st.data())
def test_weighted_means_over_ranks_and_micro_batches_equal_the_mean_over_the_step(world, count, size, limit, data):
    samplers = ranks(world, count, size, max_device_batch_size=limit)
    loss = {sample: data.draw(st.floats(-1, 1)) for sample in range(count)}
    means, expected = [0.0] * samplers[0].steps, steps(ranks(1, count, size))
    shares = [[*sampler.shares()] for sampler in samplers]
    for number, batches in enumerate(zip(*samplers, strict=True)):
        for sampler, dealt, batch in zip(samplers, shares, batches, strict=True):
            mean = sum(loss[i] for i in batch) / max(1, len(batch))
            averaged = mean * dealt[number].loss_weight / world / sampler.micro_batches
            means[number // sampler.micro_batches] += averaged
    assert means == pytest.approx([sum(loss[i] for i in step) / len(step) for step in expected], abs=1e-9)


@given(worlds, counts, sizes, limits, st.data())
def test_a_resumed_run_continues_after_the_consumed_samples_which_are_the_first_part_of_the_order(
    world, count, size, limit, data
):
    uninterrupted = ranks(1, count, size, epoch=3)
    steps_done = data.draw(st.integers(0, uninterrupted[0].steps - 1))
    start = uninterrupted[0].position(steps_done)
    resumed = ranks(world, count, size, epoch=3, max_device_batch_size=limit, start=start)
    assert resumed[0].first_batch == steps_done * resumed[0].micro_batches and resumed[0].epoch == 3
    batches_of = [list(sampler) for sampler in resumed]
    shares_of = [[share.samples for share in sampler.shares()] for sampler in resumed]
    assert shares_of == [[*map(len, batches)] for batches in batches_of]
    expected = steps(uninterrupted)[steps_done:]
    found = [[] for _ in expected]
    for number, batches in enumerate(zip_longest(*batches_of, fillvalue=())):
        found[number // resumed[0].micro_batches] += [i for batch in batches for i in batch]
    assert [sorted(step) for step in found] == expected
    resumed[0].set_epoch(4)
    samplers = ranks(world, count, size, max_device_batch_size=limit)
    assert resumed[0].first_batch == 0 and len(resumed[0]) == len(samplers[0])
    batches_done = data.draw(st.integers(0, len(samplers[0])))
    used = [i for sampler in samplers for batch in list(sampler)[:batches_done] for i in batch]
    assert sorted(used) == sorted(samplers[0].order()(np.arange(samplers[0].consumed(batches_done))).tolist())


@given(counts, sizes, sizes, worlds, st.data())
def test_a_run_resumed_with_another_global_batch_size_uses_every_sample_once(count, size, new_size, world, data):
    before = ranks(1, count, size, epoch=2)[0]
    steps_done = data.draw(st.integers(0, before.steps - 1))
    after = ranks(world, count, new_size, epoch=2, start=before.position(steps_done))
    used = [i for batch in list(before)[:steps_done] for i in batch]
    used += [i for sampler in after for batch in sampler for i in batch]
    assert sorted(used) == list(range(count))
    assert after[0].position(len(after[0])) == Position(2, after[0].steps, count)


def test_drop_last_drops_the_short_last_step_and_samples_are_in_order_without_shuffle():
    sampler = ElasticBatchSampler(10, 4, drop_last=True)
    assert [list(batch) for batch in sampler] == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(sampler) == 2
    assert sampler.position(2) == Position(0, 2, 8)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_padded_order_repeats_a_sample_with_weight_zero_on_ranks_without_samples(world):
    samplers = ranks(world, 9, 8)
    for sampler in samplers:
        sampler.is_padded = True
    last = [list(sampler)[-1] for sampler in samplers]
    assert [len(batch) for batch in last] == [1] * world and len({batch[0] for batch in last}) == 1
    shares = [[*sampler.shares()][-1] for sampler in samplers]
    assert [share.loss_weight for share in shares] == [world] + [0] * (world - 1)
    assert not any(share.has_empty_rank for share in shares)
    assert [sampler.in_flight[-1].size for sampler in samplers] == [1] + [0] * (world - 1)


def test_each_further_pass_of_an_epoch_has_another_order_and_can_be_resumed():
    sampler = ElasticBatchSampler(4, 2, shuffle=True, seed=1)
    passes = [[i for batch in sampler for i in batch] for _ in range(3)]
    assert all(sorted(samples) == [0, 1, 2, 3] for samples in passes) and len(set(map(tuple, passes))) > 1
    assert sampler.batches_of_earlier_passes == 4 and sampler.position(1) == Position(0, 1, 2, pass_index=2)
    resumed = ElasticBatchSampler(4, 2, shuffle=True, seed=1, start=Position(0, 1, 2, pass_index=1))
    assert [i for batch in resumed for i in batch] == passes[1][2:]
    assert [i for batch in resumed for i in batch] == passes[2]


def test_batches_in_flight_are_recorded_until_the_next_pass_and_limited():
    sampler = ElasticBatchSampler(10, 4, shuffle=True)
    batches = list(sampler)
    assert [samples.tolist() for samples in sampler.in_flight] == [list(batch) for batch in batches]
    iter(sampler)
    assert not sampler.in_flight
    sampler = ElasticBatchSampler(2 * 3 * MANY_IN_FLIGHT, 2)
    assert MANY_IN_FLIGHT <= max(len(sampler.in_flight) for _ in sampler) <= MANY_IN_FLIGHT + 1


@given(st.integers(1, 6), counts, st.integers(2, 40))
def test_a_short_step_gives_no_rank_a_single_sample_if_possible(world, count, share):
    samplers = ranks(world, count, share * world)
    remainder = count % (share * world)
    has_single_samples = any(len(batch) == 1 for sampler in samplers for batch in sampler)
    assert samplers[0].has_single_samples() == has_single_samples
    assert has_single_samples == (remainder == 1 or (share == 2 and 0 < remainder < 2 * world and remainder % 2 == 1))
    assert samplers[0].has_empty_batches() == any(share.has_empty_rank for share in samplers[0].shares())


@given(worlds, st.integers(0, 150), st.integers(1, 12))
def test_every_sample_is_evaluated_exactly_once_in_as_many_batches_on_all_ranks_or_in_full_ones(world, count, size):
    samplers = [EvaluationBatchSampler(count, size, rank, world) for rank in range(world)]
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
    full = [EvaluationBatchSampler(count, size, rank, world, drop_last=True) for rank in range(world)]
    assert all(len(batch) == size for sampler in full for batch in sampler) and len(full[0]) == count // (world * size)
