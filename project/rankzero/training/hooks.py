"""What the run itself wants to be called for while it trains, beside Lightning's hooks."""

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

    def on_configured(self, trainer: Trainer) -> None:
        """Optimizers and schedules have been configured, and no callback has changed them yet."""

    def on_ready(self, trainer: Trainer) -> None:
        """All that has to do with the start is done; the first batch comes next."""

    def on_batch_begun(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch is about to be trained on; before `on_train_batch_start`."""

    def on_batch_done(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch has been trained on; before `on_train_batch_end`."""

    def on_step_done(self, trainer: Trainer) -> None:
        """An optimiser step is done, and the validation that was due behind it. Nothing is half done."""

    def on_epoch_done(self, trainer: Trainer) -> None:
        """An epoch is done, its hooks and its metrics included. Nothing is half done."""

    def on_safe_point(self, trainer: Trainer) -> None:
        """Here a run can be saved and can stop. Behind both of the above, but for a step that ends an epoch."""


class LoopCallback(LoopHooks, Callback):
    """A callback that is called at Lightning's places too."""


class Subscribers:
    """Who implements which of our hooks.

    Args:
        trainer: Whose callbacks are asked, in their order.
        beside: RequestedWorld behind them.
    """

    HOOKS = ("on_ready", "on_batch_begun", "on_batch_done", "on_step_done", "on_epoch_done", "on_safe_point")

    def __init__(self, trainer: Trainer, beside: list[LoopHooks]) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        listeners = [*(listener for listener in callbacks if isinstance(listener, LoopHooks)), *beside]
        self._trainer = trainer
        self.of: dict[str, tuple[Callable[..., None], ...]] = {}
        for hook in self.HOOKS:
            idle = getattr(LoopHooks, hook)
            self.of[hook] = tuple(
                getattr(listener, hook) for listener in listeners if getattr(type(listener), hook) is not idle
            )

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls all that implement it."""
        for listen in self.of[hook]:
            listen(self._trainer, *arguments)


class HookBridge(Callback):
    """Calls our hooks of a batch from Lightning's own, where its own loop runs. The first of all callbacks.

    Args:
        call: Of `Subscribers`.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._call("on_batch_begun", batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._call("on_batch_done", batch, batch_idx)
