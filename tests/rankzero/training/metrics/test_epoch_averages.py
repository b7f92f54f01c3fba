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
def test_merged_values_of_several_ranks_equal_those_of_one_process(reduction, whole):
    parts = [
        described(logged(1.0, 4.0, reduce_fx=reduction)),
        described(logged(2.0, 7.0, 1.0, reduce_fx=reduction)),
        {},
    ]
    one = merged(parts)["training_step.loss"]
    value = one["value"] / one["weight"] if reduction == "mean" else one["value"]
    assert float(value) == pytest.approx(whole if reduction != "sum" else 15.0)


def test_metric_logged_on_only_one_rank_is_merged():
    assert set(merged([{}, described(logged(1.0))])) == {"training_step.loss"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_resumed_epoch_values_equal_uninterrupted_values(reduction):
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


def test_rank_zero_only_metric_is_not_gathered():
    assert not described(logged(1.0, rank_zero_only=True))
