"""torch's backward pass and optimiser step, without what they do for those who look on (torch 2.15).

`Tensor.backward` and `Optimizer.step` ask after tensor subclasses, function transforms, debug logs, profilers and hooks
each time. Of a small model that is a fifth of the step. Where there is none of them, what they would then call is
called at once; where there is one, and with a torch that is not known, they are called as ever.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import has_torch_function_unary

KNOWN = ("2.15",)
"""The versions of torch that are known to do no more than what is done here."""

_engine = torch.autograd.Variable._execution_engine


def run_backward(loss: Tensor) -> None:
    """As `loss.backward()`.

    Args:
        loss: One number.

    Raises:
        RuntimeError: As that does.
    """
    if (
        not (_is_known() and type(loss) is Tensor and loss.is_cpu and loss.is_floating_point() and loss.requires_grad)
        or loss.numel() != 1
        or has_torch_function_unary(loss)
        or torch._C._are_functorch_transforms_active()
        or graph.log.isEnabledFor(logging.DEBUG)
    ):
        loss.backward()
        return
    # A seed of its own for each pass: it may become the gradient of a parameter, and then change.
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def step_of(optimizer: Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """What takes an optimiser's steps: as `optimizer.step(closure)`."""
    kind, own = type(optimizer), vars(optimizer).get("step")
    plain = getattr(kind.step, "__wrapped__", None)
    if not (_is_known() and getattr(kind.step, "hooked", False) and (own is None or _is_of_schedule(own, kind))):
        return lambda closure: optimizer.step(closure)
    assert plain is not None
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    def step(closure: Callable[[], Any]) -> Any:
        hooked = before or after or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        if hooked or vars(optimizer).get("step") is not own or torch._C._autograd._profiler_enabled():
            return optimizer.step(closure)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for the schedule, which warns otherwise
        return plain(optimizer, closure)

    return step


def _is_known() -> bool:
    return torch.__version__.startswith(KNOWN)


def _is_of_schedule(step: Any, kind: type[Optimizer]) -> bool:
    """Whether an optimiser's own `step` is what torch's schedules put there, which only notes that it was called."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename == lr_scheduler.__file__ and step.__wrapped__ is kind.step
