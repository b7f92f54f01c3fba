"""Who listens at Lightning's hooks of a batch."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from project.loop_hooks import CallListeners, LoopHooks

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Lightning's hooks of a batch, which callbacks and modules share."""


class Hooks:
    """Who listens at which of Lightning's hooks of a batch: callbacks in their order, and behind them the module.

    Args:
        trainer: Whose callbacks and module are asked.

    Attributes:
        of: Hook -> those that implement it.
        anyone_looks: Whether somebody else than the run itself does, and may look at what has been logged.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        callbacks = [one for one in trainer.callbacks if not isinstance(one, CallListeners)]  # type: ignore[attr-defined]
        listening = {hook: [one for one in callbacks if overrides(one, hook, Callback)] for hook in BATCH_HOOKS}
        own = {hook: overrides(self._module, hook, LightningModule) for hook in BATCH_HOOKS}
        self.of = {hook: (listening[hook], own[hook]) for hook in BATCH_HOOKS if listening[hook] or own[hook]}
        others = (one for ones in listening.values() for one in ones if not isinstance(one, LoopHooks))
        self.anyone_looks = any(own.values()) or any(True for _ in others)

    def call(self, hook: str, *arguments: Any) -> Any:
        """Calls all that implement a hook; returns the module's answer."""
        if hook not in self.of:
            return None
        listening, own = self.of[hook]
        module, answer = self._module, None
        before, module._current_fx_name = module._current_fx_name, hook
        for callback in listening:
            getattr(callback, hook)(self._trainer, module, *arguments)
        if own:
            answer = getattr(module, hook)(*arguments)
        module._current_fx_name = before
        return answer


def overrides(one: Any, hook: str, parent: type) -> bool:
    """Whether one implements a hook itself."""
    method = getattr(one, hook, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(parent, hook)
