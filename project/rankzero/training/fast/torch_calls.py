"""torch's backward pass and optimizer step, without their checks for observers (torch 2.15).

`Tensor.backward`, `Optimizer.step` and `Optimizer.zero_grad` look for tensor subclasses, function transforms, debug
logs, profilers and hooks each time. Without any of them, the function that torch would then call is called directly.
With one of them, or if one of torch's functions has changed or was replaced (see `replaced.py`), torch's own function
is called. A step of a small model (MLP, 32 samples) takes 0.84 times as long with `fast_step` (0.55 to 0.91;
`benchmarks/tricks.py --which optimizer-step`).
"""

import logging
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import has_torch_function_unary

from rankzero.training.fast import replaced


def fast_backward(loss: Tensor) -> None:
    """As `loss.backward()`, without 50,000 of the 690,000 instructions of a small step (4 microseconds).

    Args:
        loss: One number.

    Raises:
        RuntimeError: As that does.
    """
    if (
        not _is_stock(replaced.backward)
        or not (type(loss) is Tensor and loss.is_cpu and loss.is_floating_point() and loss.requires_grad)
        or loss.numel() != 1
        or has_torch_function_unary(loss)
        or torch._C._are_functorch_transforms_active()
        or graph.log.isEnabledFor(logging.DEBUG)
    ):
        loss.backward()
        return
    # A seed of its own for each pass: it may become the gradient of a parameter, and then change.
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def fast_step(optimizer: Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """What takes an optimiser's steps: as `optimizer.step(closure=closure)`."""
    hooked, own = type(optimizer).step, vars(optimizer).get("step")
    is_known = _is_stock(replaced.step) and _code_of(hooked) is _HOOKED_STEP
    if not (is_known and (own is None or (_code_of(own) is _step_of_schedule() and own.__wrapped__ is hooked))):
        return lambda closure: optimizer.step(closure=closure)
    plain = hooked.__wrapped__  # type: ignore[attr-defined]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before_all, after_all = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks

    def step(closure: Callable[[], Any]) -> Any:
        listens = before or after or before_all or after_all or _is_profiled()
        if listens or vars(optimizer).get("step") is not own or type(optimizer).step is not hooked:
            return optimizer.step(closure=closure)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for the schedule, which warns otherwise
        return plain(optimizer, closure=closure)

    return step


def zero_gradients(optimizer: Optimizer) -> bool:
    """As `optimizer.zero_grad()`.

    Returns:
        Whether no code but torch's has run.
    """
    if (
        type(optimizer).zero_grad is not _zero_grad
        or "zero_grad" in vars(optimizer)
        or replaced.zero_grad.changed
        or _is_profiled()
    ):
        optimizer.zero_grad()
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None
    return True


_zero_grad = Optimizer.zero_grad


def _is_stock(functions: replaced.Functions) -> bool:
    """Whether functions of torch are those that this was compared with."""
    return not functions.changed and functions.are_same()


def _is_profiled() -> bool:
    return torch._C._autograd._profiler_enabled()


def _code_of(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


_HOOKED_STEP = _code_of(Optimizer.profile_hook_step(Optimizer.step))
"""The code of the wrapper that torch puts around the `step` of every optimizer class."""


@cache
def _step_of_schedule() -> CodeType | None:
    """The code of the `step` that torch's schedules give an optimizer, which only notes that it was called."""
    optimizer = SGD([torch.zeros(1)])
    LambdaLR(optimizer, lambda step: 1.0)
    return _code_of(vars(optimizer)["step"])
