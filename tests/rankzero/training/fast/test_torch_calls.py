import functools
import logging
import sys

import pytest
import torch
from torch.autograd import graph
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from rankzero.training.fast import replaced
from rankzero.training.fast.torch_calls import fast_backward, fast_step


class Stock:
    """Counts the calls of `Tensor.backward` without replacing the method."""

    def __init__(self):
        self.backwards = 0

    def __call__(self, frame, event, argument):
        self.backwards += event == "call" and frame.f_code is torch.Tensor.backward.__code__


@pytest.fixture
def stock():
    counter = Stock()
    sys.setprofile(counter)
    yield counter
    sys.setprofile(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fast_backward_equals_torchs_backward(stock, dtype, shape):
    def loss(weight):
        return (weight**2).sum().reshape(shape)

    weight = torch.arange(5, dtype=dtype, requires_grad=True)
    loss(weight).backward()
    expected, weight.grad, stock.backwards = weight.grad, None, 0
    fast_backward(loss(weight))
    assert torch.equal(weight.grad, expected) and weight.grad.dtype == dtype and stock.backwards == 0
    fast_backward(loss(weight))
    assert torch.equal(weight.grad, 2 * expected)  # gradients accumulate, as in torch


def test_gradient_that_is_the_seed_is_not_shared():
    weight, other = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    fast_backward(weight.view(()))
    weight.grad.mul_(7)
    fast_backward(other.view(()))
    assert other.grad == 1 and weight.grad == 7


def test_fast_backward_raises_the_same_errors_as_torch():
    for loss in (torch.ones(3, requires_grad=True) * 2, torch.ones(()), torch.ones((), dtype=torch.complex64)):
        with pytest.raises(RuntimeError) as theirs:
            loss.backward()
        with pytest.raises(RuntimeError) as ours:
            fast_backward(loss)
        assert str(ours.value) == str(theirs.value)


class Subclass(torch.Tensor):
    pass


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), settings=None):
        return function(*arguments, **(settings or {}))


def test_observed_or_changed_backward_calls_torchs_backward(stock, monkeypatch):
    weight = torch.ones(3, requires_grad=True)

    def goes_torchs_way(loss=lambda: (weight * 2).sum()):
        stock.backwards = 0
        fast_backward(loss())
        return stock.backwards > 0

    assert goes_torchs_way(lambda: (weight * 2).sum().as_subclass(Subclass))
    with Mode():
        assert goes_torchs_way()
    level = graph.log.level
    graph.log.setLevel(logging.DEBUG)
    try:
        assert goes_torchs_way()
    finally:
        graph.log.setLevel(level)
    with monkeypatch.context() as patch:
        patch.setitem(vars(replaced.backward), "changed", ["torch.Tensor.backward"])
        assert goes_torchs_way()
    assert not goes_torchs_way()
    assert torch.equal(weight.grad, torch.full((3,), 10.0))


class Own(torch.optim.SGD):
    def step(self, scale=None, closure=None):
        assert scale is None
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
        return loss


def after(steps, kind, quick, schedule=False, arrange=lambda optimizer: None):
    """Returns the weights and losses after some steps, with `fast_step` if `quick`, otherwise with torch's step."""
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
def test_fast_steps_equal_torchs_steps(kind, schedule):
    assert after(3, KINDS[kind], True, schedule) == after(3, KINDS[kind], False, schedule)


def long_way(*arguments):
    raise AssertionError("the long way")


def test_fast_step_skips_torchs_wrapper_unless_torch_has_changed(monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", long_way)
    with pytest.raises(AssertionError, match="the long way"):
        after(1, KINDS["SGD"], False)
    after(1, KINDS["SGD"], True)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the long way"):
        patch.setitem(vars(replaced.step), "changed", ["torch.optim.Optimizer.profile_hook_step"])
        after(1, KINDS["SGD"], True)


def test_step_hooks_and_profiler_observe_fast_steps():
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


def test_step_that_is_wrapped_on_an_optimizer_instance_is_called():
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
    wrap(optimizer)  # during a run
    step(lambda: None)
    assert len(calls) == 5


def test_step_that_is_wrapped_on_an_optimizer_class_is_called(monkeypatch):
    calls, step = [], torch.optim.SGD.step

    @functools.wraps(step)
    def wrapped(self, closure=None):
        calls.append(1)
        return step(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", wrapped)
    after(2, KINDS["SGD"], True)
    assert len(calls) == 2
