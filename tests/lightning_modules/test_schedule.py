from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from lightning_modules.schedule import Constant, Cosine, OneCycle, Schedule

KINDS = (Constant, Cosine, OneCycle)


def sgd(lr=2.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def rates(make_schedule, steps):
    optimizer = sgd()
    schedule = make_schedule(optimizer)
    if isinstance(schedule, Schedule):
        schedule.plan(steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_constant_rate_is_kept_and_cosine_equals_torchs_annealing_after_a_linear_warmup():
    assert rates(Constant, 5) == [2.0] * 5
    found = rates(Cosine, 20)
    assert found == pytest.approx(rates(lambda optimizer: CosineAnnealingLR(optimizer, T_max=20), 20))
    assert found[10] == pytest.approx(1.0)
    assert rates(lambda optimizer: Cosine(optimizer, final_factor=0.1), 1000)[-1] == pytest.approx(0.2, rel=1e-3)
    for kind in (partial(Constant, warmup_steps=4), partial(Cosine, warmup_steps=4)):
        assert rates(kind, 20)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_one_cycle_rises_for_30_percent_of_the_steps_and_then_falls():
    found = rates(OneCycle, 100)
    assert found[0] == pytest.approx(2.0 * 0.04) and max(found) == pytest.approx(2.0) and found[-1] < 0.01
    top = found.index(max(found))
    assert top == 30 and found[:31] == sorted(found[:31]) and found[30:] == sorted(found[30:], reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_schedule_returns_the_optimizers_rate_and_a_restored_one_continues_with_the_new_plan(kind):
    first, second = kind(sgd()), kind(sgd())
    first.plan(10)
    assert first.get_last_lr() == [first.optimizer.param_groups[0]["lr"]]
    for _ in range(5):
        first.optimizer.step()
        first.step()
    second.plan(20)
    second.load_state_dict(first.state_dict())
    assert (second.last_epoch, second.total_steps) == (5, 20)


def test_an_invalid_warmup_or_a_schedule_without_a_factor_is_refused():
    class Empty(Schedule): ...

    for refused, error, message in (
        (lambda: Constant(sgd(), warmup_steps=-1), ValueError, "must be"),
        (lambda: OneCycle(sgd(), warmup_fraction=1.0), ValueError, "must be"),
        (lambda: Empty(sgd()), TypeError, "abstract class Empty .*factor"),
    ):
        with pytest.raises(error, match=message):
            refused()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.3, torch.tensor(0.3)])
def test_a_step_equals_torchs_step(kind, rate):
    states = []
    for step in (kind.step, LRScheduler.step):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=rate.clone() if isinstance(rate, torch.Tensor) else rate)
        schedule = kind(optimizer)
        schedule.plan(10)
        for _ in range(7):
            optimizer.step()
            step(schedule)
        rates_of = [group["lr"] for group in optimizer.param_groups], schedule.get_last_lr()
        states.append((*([*map(float, each)] for each in rates_of), schedule.last_epoch, schedule._step_count))
        assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
    assert states[0] == states[1]
