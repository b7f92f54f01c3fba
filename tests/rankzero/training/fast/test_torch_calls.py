import logging

import pytest
import torch
from torch.autograd import graph
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from rankzero.training.fast import replaced
from rankzero.training.fast.torch_calls import fast_backward, fast_step
from stock import calls_of, log_calls


def calls_torchs_backward(loss):
    return bool(calls_of([torch.Tensor.backward], "self", lambda: fast_backward(loss)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fast_backward_equals_torchs_backward(dtype, shape):
    def loss(weight):
        return (weight**2).sum().reshape(shape)

    weight = torch.arange(5, dtype=dtype, requires_grad=True)
    loss(weight).backward()
    expected, weight.grad = weight.grad, None
    assert not calls_torchs_backward(loss(weight))
    assert torch.equal(weight.grad, expected) and weight.grad.dtype == dtype
    fast_backward(loss(weight))
    assert torch.equal(weight.grad, 2 * expected)  # gradients accumulate, as in torch


def test_fast_backward_raises_the_same_errors_as_torch():
    for loss in (torch.ones(3, requires_grad=True) * 2, torch.ones(()), torch.ones((), dtype=torch.complex64)):
        with pytest.raises(RuntimeError) as expected:
            loss.backward()
        with pytest.raises(RuntimeError) as raised:
            fast_backward(loss)
        assert str(raised.value) == str(expected.value)


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), settings=None):
        return function(*arguments, **(settings or {}))


def test_observed_or_untested_backward_calls_torchs_backward(monkeypatch, caplog):
    weight = torch.ones(3, requires_grad=True)
    assert calls_torchs_backward((weight * 2).sum().as_subclass(type("Subclass", (torch.Tensor,), {})))
    with Mode():
        assert calls_torchs_backward((weight * 2).sum())
    with caplog.at_level(logging.DEBUG, graph.log.name):
        assert calls_torchs_backward((weight * 2).sum())
    with monkeypatch.context() as patch:
        patch.setattr(replaced, "IS_TORCH_TESTED", False)
        assert calls_torchs_backward((weight * 2).sum())
    assert not calls_torchs_backward((weight * 2).sum())
    assert torch.equal(weight.grad, torch.full((3,), 10.0))


class CustomSGD(torch.optim.SGD):
    def step(self, scale=None, closure=None):
        assert scale is None
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
        return loss


def train_steps(steps, kind, is_fast, schedule=False, configure=lambda optimizer: None):
    """Returns the weights and losses after some steps, with `fast_step` if `is_fast`, otherwise with torch's step."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = kind([weight])
    scheduler = ExponentialLR(optimizer, 0.9) if schedule else None
    configure(optimizer)
    step = fast_step(optimizer) if is_fast else lambda closure: optimizer.step(closure=closure)
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = ((weight - 1) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(step(closure).item())
        if scheduler:
            scheduler.step()
    return weight.tolist(), losses


KINDS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "LBFGS": torch.optim.LBFGS,
    "own": lambda weights: CustomSGD(weights, lr=0.1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_steps_equal_torchs_steps(kind, schedule):
    assert train_steps(3, KINDS[kind], True, schedule) == train_steps(3, KINDS[kind], False, schedule)


def test_fast_step_skips_torchs_wrapper_unless_the_release_is_untested(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", lambda *arguments: calls.append(1))
    train_steps(1, KINDS["SGD"], True)
    assert calls == []
    train_steps(1, KINDS["SGD"], False)
    assert len(calls) == 1
    monkeypatch.setattr(replaced, "IS_TORCH_TESTED", False)
    train_steps(1, KINDS["SGD"], True)
    assert len(calls) == 2


def test_step_hooks_and_profiler_observe_fast_steps():
    seen = []

    def record_call(optimizer, arguments, settings):
        seen.append((len(arguments), [*settings]))

    def register_local_hooks(optimizer):
        optimizer.register_step_pre_hook(record_call)
        optimizer.register_step_post_hook(record_call)

    expected = train_steps(2, KINDS["SGD"], False)
    assert train_steps(2, KINDS["SGD"], True, configure=register_local_hooks) == expected
    assert seen == [(1, ["closure"])] * 4
    handle = register_optimizer_step_post_hook(record_call)
    try:
        assert train_steps(2, KINDS["SGD"], True) == expected and len(seen) == 6
    finally:
        handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert train_steps(2, KINDS["SGD"], True) == expected
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_step_that_is_wrapped_on_an_optimizer_with_a_schedule_or_during_a_run_is_called():
    calls = []

    def wrap(optimizer):
        optimizer.step = log_calls(optimizer.step, calls, "step")

    expected = train_steps(2, KINDS["SGD"], False, True)
    assert train_steps(2, KINDS["SGD"], True, True, wrap) == expected and len(calls) == 2
    optimizer = KINDS["SGD"]([torch.nn.Parameter(torch.ones(1))])
    step = fast_step(optimizer)
    wrap(optimizer)  # during a run
    step(lambda: None)
    assert len(calls) == 3
