import pytest
import torch

from rankzero.training.metrics.epoch_averages import Results, merged
from rankzero.training.metrics.step_averages import StepAverages


def log(results, value, name="loss", size=1, **settings):
    results.log("training_step", name, torch.tensor(value), batch_size=size, on_step=False, on_epoch=True, **settings)


def logged(*values, **settings):
    results = Results(StepAverages(None))
    for number, value in enumerate(values):
        log(results, value, size=number + 1, **settings)
    return results


def described(results):
    from rankzero.training.metrics.epoch_averages import gathered

    return gathered(results)


@pytest.mark.parametrize(
    ("reduction", "whole"),
    [("mean", (1 * 1 + 4 * 2 + 2 * 1 + 7 * 2 + 1 * 3) / 9), ("sum", 15.0), ("max", 7.0), ("min", 1.0)],
)
def test_what_ranks_have_gathered_is_what_one_would_have(reduction, whole):
    parts = [
        described(logged(1.0, 4.0, reduce_fx=reduction)),
        described(logged(2.0, 7.0, 1.0, reduce_fx=reduction)),
        {},
    ]
    one = merged(parts)["training_step.loss"]
    value = one["value"] / one["weight"] if reduction == "mean" else one["value"]
    assert float(value) == pytest.approx(whole if reduction != "sum" else 15.0)


def test_a_metric_that_only_one_rank_has_logged_is_there():
    assert set(merged([{}, described(logged(1.0))])) == {"training_step.loss"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_gathering_goes_on_where_it_left_off(reduction):
    values = [0.1, 0.7, 0.2, 0.3]
    whole = logged(*values, reduce_fx=reduction)
    rest = Results(StepAverages(None))
    rest.carried = described(logged(*values[:2], reduce_fx=reduction))
    assert described(rest).keys() == described(whole).keys()
    for number in (2, 3):
        log(rest, values[number], size=number + 1, reduce_fx=reduction)
    assert not rest.carried
    one, other = described(rest)["training_step.loss"], described(whole)["training_step.loss"]
    assert torch.equal(one["value"], other["value"]) and torch.equal(one["weight"], other["weight"])


def test_what_is_not_to_be_reduced_is_left_alone():
    assert not described(logged(1.0, rank_zero_only=True))
