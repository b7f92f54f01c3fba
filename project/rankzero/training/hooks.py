"""Hooks that Rankzero's training loops call in addition to Lightning's hooks."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from rankzero.distributed.monitoring.activity import (
    BACKWARD,
    CHECKPOINT,
    FORWARD,
    HOOK,
    OPTIMIZER,
    SANITY_CHECK,
    VALIDATION,
    Activity,
)
from rankzero.training.lightning_inside import BATCH_HOOKS, overrides

if TYPE_CHECKING:
    from rankzero.training.metrics.step_log import IntervalRecord


class LoopHooks:
    """Base class of the subscribers to Rankzero's hooks.

    All ranks call each hook at the same points, except `on_tick`, which depends on each rank's clock. Each implemented
    hook costs one Python call. A hook without implementations costs nothing.
    """

    def needs(self, hook: str) -> bool:
        """Whether an implemented hook has anything to do in this run; queried once, after `on_ready`."""
        return True

    def on_configured(self, trainer: Trainer) -> None:
        """Called on callbacks only, after optimizers and schedules are configured, before any callback changes them."""

    def on_ready(self, trainer: Trainer) -> None:
        """Called when the start is complete, before the first batch."""

    def on_logging_step(self, trainer: Trainer) -> None:
        """Called before `on_train_batch_start` of each batch of a step that ends a logging interval."""

    def on_interval_end(self, trainer: Trainer) -> None:
        """Called after Lightning has logged the metrics of every `log_every_n_steps`-th step."""

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Called after each batch, before `on_train_batch_end`."""

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """Called after the last batch of an epoch, and after other batches at most once per `TICK_SECONDS`."""

    def on_step_done(self, trainer: Trainer) -> None:
        """Called after an optimizer step and any validation that was due after the step; no step is in progress."""

    def on_epoch_done(self, trainer: Trainer) -> None:
        """Called after an epoch, including its hooks and metrics; no epoch is in progress."""

    def on_safe_point(self, trainer: Trainer) -> None:
        """Called where a run can be saved and can stop: first, after a step except an epoch's last, after an epoch."""


class LoopCallback(LoopHooks, Callback):
    """Callback that implements both Lightning's hooks and those of `LoopHooks`."""


TICK_SECONDS = 0.1


class Subscribers:
    """Table of the hooks of `LoopHooks` and the subscribers that implement them.

    The Trainer's callbacks are called first, in their order, then `extra_subscribers`, also in a finder's trials.
    """

    def __init__(self, trainer: Trainer, extra_subscribers: list[LoopHooks]) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        subscribers = [each for each in (*callbacks, *extra_subscribers) if isinstance(each, LoopHooks)]
        self._trainer = trainer
        self.methods: dict[str, tuple[Callable[..., None], ...]] = {}
        """Hook -> the methods to call, in this order."""
        for hook, default in vars(LoopHooks).items():
            if not hook.startswith("on_"):
                continue
            implementers = [subscriber for subscriber in subscribers if getattr(type(subscriber), hook) is not default]
            self.methods[hook] = tuple(getattr(subscriber, hook) for subscriber in implementers)

    def call(self, hook: str, *arguments: Any) -> None:
        for method in self.methods[hook]:
            method(self._trainer, *arguments)

    def drop_unneeded(self) -> None:
        """Removes methods that have nothing to do in this run (see `LoopHooks.needs`), so that no step calls them."""
        for hook, methods in self.methods.items():
            self.methods[hook] = tuple(method for method in methods if method.__self__.needs(hook))  # type: ignore[attr-defined]

    def remove(self, hook: str, subscriber: LoopHooks) -> None:
        """Removes a subscriber's method that has nothing to do in the rest of the run; not for hooks of a batch."""
        self.methods[hook] = tuple(method for method in self.methods[hook] if method.__self__ is not subscriber)  # type: ignore[attr-defined]


class HookBridge(Callback):
    """Calls the batch hooks of `LoopHooks` when Lightning's own loop runs. Must be the first of all callbacks.

    Also records the phases of Lightning's own loop, of validations and of saves. Rankzero's loop skips its batch hooks.
    """

    def __init__(self, call: Callable[..., None], activity: Activity, record: "IntervalRecord") -> None:
        self._call, self._activity, self._record = call, activity, record
        self._next_tick = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._record.is_due:
            self._activity.enter(HOOK)
            self._call("on_logging_step")
        self._activity.enter(FORWARD)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._activity.enter(BACKWARD)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._activity.enter(OPTIMIZER)
        if self._record.is_due and self._record.is_enabled:
            self._record.measure_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._activity.enter(HOOK)
        self._record.add_outputs(outputs, batch)
        self._call("on_batch_done", batch, batch_idx)
        now = time.monotonic()
        if now >= self._next_tick or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._next_tick = now + TICK_SECONDS
            self._call("on_tick", batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._activity.enter(HOOK)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._activity.enter(CHECKPOINT)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            self._activity.enter(SANITY_CHECK)
        elif trainer.state.fn is TrainerFn.FITTING:
            self._activity.begin_validation(trainer.global_step)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._activity.enter(SANITY_CHECK if trainer.sanity_checking else VALIDATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.FITTING:
            self._activity.enter(HOOK)


class BatchHooks:
    """Caller of Lightning's hooks of a batch: those of the callbacks in list order, then the module's.

    It knows the callbacks and overridden hooks that it found when it was created.

    Attributes:
        observed: Hook -> whether a call of it reaches user code.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._module_vars = vars(self._module)
        self._called = [callback for callback in trainer.callbacks if _needs_call(callback)]  # type: ignore[attr-defined]
        self._overridden = {hook: overrides(self._module, hook, LightningModule) for hook in BATCH_HOOKS}
        self.observed = {hook: bool(self._called) or overridden for hook, overridden in self._overridden.items()}

    @property
    def may_change_gradients(self) -> bool:
        """Whether the module or a callback implements a hook between the backward pass and the optimizer's update."""
        hooks = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
        overridden = (overrides(callback, hook, Callback) for callback in self._called for hook in hooks)
        return any(self._overridden[hook] for hook in hooks) or any(overridden)

    def call(self, hook: str, *arguments: Any) -> Any:
        """Calls a hook of all callbacks and of the module, and returns the result of the module's hook."""
        module, module_vars, result = self._module, self._module_vars, None
        previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], hook
        for callback in self._called:
            method = getattr(callback, hook)
            if callable(method):
                method(self._trainer, module, *arguments)
        if self._overridden[hook]:
            result = getattr(module, hook)(*arguments)
        module_vars["_current_fx_name"] = previous_hook
        return result


def _needs_call(callback: Callback) -> bool:
    """Returns whether a callback is a user's, or overrides one of `BATCH_HOOKS`."""
    if isinstance(callback, HookBridge):
        return False
    return not isinstance(callback, LoopHooks) or any(overrides(callback, hook, Callback) for hook in BATCH_HOOKS)
