"""What the run itself wants to be called for while it trains, beside Lightning's hooks."""

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class LoopHooks:
    """What is called in the run's loops. All ranks are called at the same time.

    Each call costs a Python call and nothing else; a hook that nobody implements costs nothing.

    Attributes:
        in_trials: Whether the trials of a finder call the hooks too.
    """

    in_trials = False

    def needs(self, hook: str) -> bool:
        """Whether a hook that this implements has anything to do in this run; asked once, after `on_ready`."""
        return True

    def on_configured(self, trainer: Trainer) -> None:
        """Optimizers and schedules have been configured, and no callback has changed them yet."""

    def on_ready(self, trainer: Trainer) -> None:
        """All that has to do with the start is done; the first batch comes next."""

    def on_logging_step(self, trainer: Trainer) -> None:
        """A batch whose step is logged is about to be trained on; before `on_train_batch_start`."""

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch has been trained on; before `on_train_batch_end`."""

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch has been trained on: the last of an epoch, or one at least `TICK_SECONDS` after the last tick."""

    def on_step_done(self, trainer: Trainer) -> None:
        """An optimiser step is done, and the validation that was due behind it. Nothing is half done."""

    def on_epoch_done(self, trainer: Trainer) -> None:
        """An epoch is done, its hooks and its metrics included. Nothing is half done."""

    def on_safe_point(self, trainer: Trainer) -> None:
        """Here a run can be saved and can stop. Behind both of the above, but for a step that ends an epoch."""


class LoopCallback(LoopHooks, Callback):
    """A callback that is called at Lightning's places too."""


TICK_SECONDS = 0.1


class Subscribers:
    """Which subscribers implement which of our hooks.

    Args:
        trainer: Its callbacks are the first subscribers, in their order.
        beside: Listeners called after the callbacks.
    """

    HOOKS = (
        *("on_ready", "on_logging_step", "on_batch_done", "on_tick", "on_step_done", "on_epoch_done"),
        "on_safe_point",
    )

    def __init__(self, trainer: Trainer, beside: list[LoopHooks]) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        subscribers = [*(subscriber for subscriber in callbacks if isinstance(subscriber, LoopHooks)), *beside]
        self._trainer = trainer
        self.of: dict[str, tuple[Callable[..., None], ...]] = {}
        """Hook -> the methods to call, in order."""
        for hook in self.HOOKS:
            idle = getattr(LoopHooks, hook)
            implemented = [subscriber for subscriber in subscribers if getattr(type(subscriber), hook) is not idle]
            self.of[hook] = tuple(getattr(subscriber, hook) for subscriber in implemented)

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls all subscribers that implement it."""
        for listen in self.of[hook]:
            listen(self._trainer, *arguments)

    def drop_idle(self) -> None:
        """Leaves out subscribers that have nothing to do in this run, so that a step does not call them."""
        for hook, methods in self.of.items():
            self.of[hook] = tuple(method for method in methods if method.__self__.needs(hook))  # type: ignore[attr-defined]


class HookBridge(Callback):
    """Calls our hooks of a batch from Lightning's own, where its own loop runs. The first of all callbacks.

    Args:
        call: Calls one of our hooks.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self._next_tick = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and trainer.global_step % every == 0:
            self._call("on_logging_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._call("on_batch_done", batch, batch_idx)
        now = time.monotonic()
        if now >= self._next_tick or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._next_tick = now + TICK_SECONDS
            self._call("on_tick", batch, batch_idx)
