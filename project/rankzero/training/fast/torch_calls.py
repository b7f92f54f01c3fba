"""torch's backward pass and optimizer step without the checks for hooks, profilers and subclasses (torch 2.15).

`Tensor.backward`, `Optimizer.step` and `Optimizer.zero_grad` check for tensor subclasses, function transforms, debug
logs, profilers and hooks at every call. If none is in use, the functions here directly call the function that torch
would call in the end. Otherwise, with a release of torch that was not tested, or if a program has replaced one of
torch's functions (see `replaced.py`), they call torch's own function. A step of a small model (MLP, 32 samples) takes
0.84 times as long with `fast_step` (0.55 to 0.91; `benchmarks/tricks.py --which optimizer-step`).
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
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import has_torch_function_unary

from rankzero.training.fast import replaced


def fast_backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does, but saves 50,000 of a small step's 690,000 instructions (4 microseconds).

    Args:
        loss: Tensor with one element.

    Raises:
        RuntimeError: The same errors as from `loss.backward()`.
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
    # Each pass needs a new seed: autograd may store it as the gradient of a parameter, which is modified later.
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def fast_step(optimizer: Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that does what `optimizer.step(closure=closure)` does."""
    class_step, instance_step = type(optimizer).step, vars(optimizer).get("step")
    is_known = _is_stock(replaced.step) and _code_of(class_step) is _HOOKED_STEP_CODE
    if not (
        is_known
        and (
            instance_step is None
            or (_code_of(instance_step) is _scheduler_step_code() and instance_step.__wrapped__ is class_step)
        )
    ):
        return lambda closure: optimizer.step(closure=closure)
    unwrapped_step = class_step.__wrapped__  # type: ignore[attr-defined]
    pre_hooks, post_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    global_pre_hooks, global_post_hooks = (
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )

    def step(closure: Callable[[], Any]) -> Any:
        is_observed = pre_hooks or post_hooks or global_pre_hooks or global_post_hooks or _is_profiled()
        if is_observed or vars(optimizer).get("step") is not instance_step or type(optimizer).step is not class_step:
            return optimizer.step(closure=closure)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise the learning rate scheduler warns
        return unwrapped_step(optimizer, closure=closure)

    return step


def zero_gradients(optimizer: Optimizer) -> bool:
    """Sets the gradients to None, as `optimizer.zero_grad()` does.

    Returns:
        False if this called `optimizer.zero_grad()`, which may have run user code; otherwise True.
    """
    if (
        type(optimizer).zero_grad is not _stock_zero_grad
        or "zero_grad" in vars(optimizer)
        or not replaced.IS_TORCH_TESTED
        or _is_profiled()
    ):
        optimizer.zero_grad()
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None
    return True


_stock_zero_grad = Optimizer.zero_grad


def _is_stock(functions: replaced.Functions) -> bool:
    """Returns whether torch is a tested release and no program has replaced these functions."""
    return replaced.IS_TORCH_TESTED and functions.are_same()


def _is_profiled() -> bool:
    return torch._C._autograd._profiler_enabled()


def _code_of(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


_HOOKED_STEP_CODE = _code_of(Optimizer.profile_hook_step(Optimizer.step))
"""Code object of the wrapper that torch puts around the `step` of every optimizer class."""


@cache
def _scheduler_step_code() -> CodeType | None:
    """Returns the code object of the wrapper that torch's schedulers put around `optimizer.step` to record calls."""
    optimizer = SGD([torch.zeros(1)])
    LambdaLR(optimizer, lambda step: 1.0)
    return _code_of(vars(optimizer)["step"])
