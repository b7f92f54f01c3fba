import functools

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankzero.training.fast import replaced
from rankzero.training.fast.optimizer import fast_step


class Own(torch.optim.SGD):
    def step(self, scale=None, closure=None):
        assert scale is None
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
        return loss


def after(steps, kind, quick, schedule=False, arrange=lambda optimizer: None):
    """The weights and losses after some steps, taken as torch does or as we do."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = kind([weight])
    rates = ExponentialLR(optimizer, 0.9) if schedule else None
    arrange(optimizer)
    step = fast_step(optimizer) if quick else lambda closure: optimizer.step(closure=closure)
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = ((weight - 1) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(step(closure).item())
        if rates:
            rates.step()
    return weight.tolist(), losses


KINDS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "LBFGS": torch.optim.LBFGS,
    "own": lambda weights: Own(weights, lr=0.1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_torchs(kind, schedule):
    assert after(3, KINDS[kind], True, schedule) == after(3, KINDS[kind], False, schedule)


def long_way(*arguments):
    raise AssertionError("the long way")


def test_a_step_goes_past_what_nobody_listens_to(monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", long_way)
    with pytest.raises(AssertionError, match="the long way"):
        after(1, KINDS["SGD"], False)
    after(1, KINDS["SGD"], True)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the long way"):
        patch.setitem(vars(replaced.step), "changed", ["torch.optim.Optimizer.profile_hook_step"])
        after(1, KINDS["SGD"], True)


def test_who_looks_on_at_a_step_is_called():
    seen = []

    def listen(optimizer, arguments, settings):
        seen.append((len(arguments), [*settings]))

    def locally(optimizer):
        optimizer.register_step_pre_hook(listen)
        optimizer.register_step_post_hook(listen)

    expected = after(2, KINDS["SGD"], False)
    assert after(2, KINDS["SGD"], True, arrange=locally) == expected and seen == [(1, ["closure"])] * 4
    handle = register_optimizer_step_post_hook(listen)
    try:
        assert after(2, KINDS["SGD"], True) == expected and len(seen) == 6
    finally:
        handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert after(2, KINDS["SGD"], True) == expected
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_a_step_that_somebody_has_wrapped_is_called_wrapped():
    calls = []

    def wrap(optimizer):
        step = optimizer.step

        def wrapped(closure=None):
            calls.append(1)
            return step(closure)

        wrapped.__dict__.update(getattr(step, "__dict__", {}))  # as functools.wraps does
        optimizer.step = wrapped

    for schedule in (False, True):
        expected = after(2, KINDS["SGD"], False, schedule)
        assert after(2, KINDS["SGD"], True, schedule, wrap) == expected
    assert len(calls) == 4

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = KINDS["SGD"]([weight])
    step = fast_step(optimizer)
    wrap(optimizer)  # when the run is under way
    step(lambda: None)
    assert len(calls) == 5


def test_a_kind_of_optimiser_that_somebody_has_wrapped_steps_wrapped(monkeypatch):
    calls, step = [], torch.optim.SGD.step

    @functools.wraps(step)
    def wrapped(self, closure=None):
        calls.append(1)
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", wrapped)
    after(2, KINDS["SGD"], True)
    assert len(calls) == 2
