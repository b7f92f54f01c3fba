"""Private functions of torch (2.10 to 2.15), each with the public function as fallback.

`Tensor.backward`, `Optimizer.step` and `Optimizer.zero_grad` check for tensor subclasses, profilers and hooks at every
call. If none is in use, the functions here call the function that torch would call in the end. A step of a small model
(MLP, 32 samples) takes 0.84 times as long with `stepper` (0.55 to 0.91; `benchmarks/tricks.py --which optimizer-step`).
"""

from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

run_backward: Any = None
is_profiled: Any = None
step_wrapper: CodeType | None = None
"""Code object of the wrapper that torch puts around the `step` of every optimizer class."""
if (2, 10) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15):
    with suppress(AttributeError):
        run_backward = torch.autograd.Variable._execution_engine.run_backward
        is_profiled = torch._C._autograd._profiler_enabled
        step_wrapper = Optimizer.profile_hook_step(Optimizer.step).__code__


def backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does, but saves 50,000 of a small step's 690,000 instructions (4 microseconds).

    Args:
        loss: Tensor with one element.

    Raises:
        RuntimeError: The same errors as from `loss.backward()`.
    """
    is_plain = type(loss) is Tensor and loss.is_cpu and loss.is_floating_point() and loss.requires_grad
    if run_backward is None or not is_plain or loss.numel() != 1:
        loss.backward()
        return
    # Each pass needs a new seed: autograd may store it as the gradient of a parameter, which is modified later.
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def stepper(optimizer: Optimizer) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that does what `optimizer.step(closure=closure)` does."""
    kind = type(optimizer)
    wrapped, set_step = kind.step, vars(optimizer).get("step")
    is_of_schedule = getattr(set_step, "_wrapped_by_lr_sched", False) and set_step.__wrapped__ is wrapped  # type: ignore[union-attr]
    is_plain = set_step is None or is_of_schedule
    if step_wrapper is None or getattr(wrapped, "__code__", None) is not step_wrapper or not is_plain:
        return lambda closure: optimizer.step(closure=closure)
    unwrapped = wrapped.__wrapped__  # type: ignore[attr-defined]
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    hooks += [optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]

    def step(closure: Callable[[], Any]) -> Any:
        if any(hooks) or is_profiled() or vars(optimizer).get("step") is not set_step or kind.step is not wrapped:
            return optimizer.step(closure=closure)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise the learning rate scheduler warns
        return unwrapped(optimizer, closure=closure)

    return step


def zero_gradients(optimizer: Optimizer) -> None:
    """Does what `optimizer.zero_grad()` does."""
    is_plain = type(optimizer).zero_grad is _zero_grad and "zero_grad" not in vars(optimizer)
    if not is_plain or is_profiled is None or is_profiled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = None


_zero_grad = Optimizer.zero_grad
