import torch

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.figures.value_pairs import MAX_PAIRS, PairSelection
from rankzero.training.strategies import OneProcess


def gather(selection):
    return selection.gather(OneProcess(SamplingPlan(), device="cpu"), selection.row())


def test_few_pairs_are_all_kept():
    selection, values = PairSelection(1, 0), torch.randn(30, 2)
    assert gather(selection).total == 0
    for part in values.split(7):
        selection.add(part, -part)
    pairs = gather(selection)
    assert pairs.total == 60 and torch.equal(pairs.predicted, -pairs.true)
    assert torch.equal(pairs.predicted.sort().values, values.double().flatten().sort().values)


def test_many_pairs_are_selected_evenly_without_the_global_generator_and_each_rank_keeps_a_part():
    state, selection = torch.get_rng_state(), PairSelection(1, 0)
    for part in torch.arange(100_000.0).split(7_001):
        selection.add(part, part)
    pairs = gather(selection)
    assert len(pairs.true) == MAX_PAIRS == len(set(pairs.true.tolist())) and pairs.total == 100_000
    assert abs(float(pairs.true.mean()) - 50_000) < 3_000
    assert torch.equal(torch.get_rng_state(), state)
    assert PairSelection(8, 3).limit == 250 and PairSelection(3, 0).limit == 667
