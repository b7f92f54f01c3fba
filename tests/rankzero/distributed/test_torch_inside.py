import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankzero.distributed import torch_inside
from rankzero.distributed.torch_inside import backward, stepper
from stock import calls_of, log_calls


def calls_torchs_backward(loss):
    return bool(calls_of([torch.Tensor.backward], "self", lambda: backward(loss)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_backward_equals_torchs_backward(dtype, shape):
    def loss(weight):
        return (weight**2).sum().reshape(shape)

    weight = torch.arange(5, dtype=dtype, requires_grad=True)
    loss(weight).backward()
    expected, weight.grad = weight.grad, None
    assert not calls_torchs_backward(loss(weight))
    assert torch.equal(weight.grad, expected) and weight.grad.dtype == dtype
    backward(loss(weight))
    assert torch.equal(weight.grad, 2 * expected)  # gradients accumulate, as in torch


def test_backward_of_a_subclass_or_with_an_untested_torch_calls_torchs_backward(monkeypatch):
    weight = torch.ones(3, requires_grad=True)
    assert calls_torchs_backward((weight * 2).sum().as_subclass(type("Subclass", (torch.Tensor,), {})))
    monkeypatch.setattr(torch_inside, "run_backward", None)
    assert calls_torchs_backward((weight * 2).sum())
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


def momentum_sgd(weights):
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def train_steps(steps, is_fast, schedule=False, configure=lambda optimizer: None):
    """Returns the weights and losses after some steps, with `stepper` if `is_fast`, otherwise with torch's step."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = momentum_sgd([weight])
    scheduler = ExponentialLR(optimizer, 0.9) if schedule else None
    configure(optimizer)
    step = stepper(optimizer) if is_fast else lambda closure: optimizer.step(closure=closure)
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


def test_stepper_skips_torchs_wrapper_unless_the_release_is_untested(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.optim.Optimizer, "_optimizer_step_code", lambda *arguments: calls.append(1))
    train_steps(1, True)
    assert calls == []
    train_steps(1, False)
    assert len(calls) == 1
    monkeypatch.setattr(torch_inside, "step_wrapper", None)
    train_steps(1, True)
    assert len(calls) == 2


def test_step_hooks_and_profiler_observe_fast_steps():
    seen = []

    def record_call(optimizer, arguments, settings):
        seen.append((len(arguments), [*settings]))

    def register_local_hooks(optimizer):
        optimizer.register_step_pre_hook(record_call)
        optimizer.register_step_post_hook(record_call)

    expected = train_steps(2, False)
    assert train_steps(2, True, configure=register_local_hooks) == expected
    assert seen == [(1, ["closure"])] * 4
    handle = register_optimizer_step_post_hook(record_call)
    try:
        assert train_steps(2, True) == expected and len(seen) == 6
    finally:
        handle.remove()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert train_steps(2, True) == expected
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


@pytest.mark.filterwarnings("error")  # a schedule warns if it does not see the steps of its optimizer
def test_step_with_a_schedule_equals_torchs_and_one_that_is_wrapped_before_or_during_a_run_is_called():
    calls = []

    def wrap(optimizer):
        optimizer.step = log_calls(optimizer.step, calls, "step")

    expected = train_steps(2, False, True)
    assert train_steps(2, True, True) == expected == train_steps(2, True, True, wrap) and len(calls) == 2
    optimizer = momentum_sgd([torch.nn.Parameter(torch.ones(1))])
    step = stepper(optimizer)
    wrap(optimizer)  # during a run
    step(lambda: None)
    assert len(calls) == 3
