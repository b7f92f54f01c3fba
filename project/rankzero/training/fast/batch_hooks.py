"""Calls Lightning's hooks of a training batch in Lightning's order, and skips hooks that no code overrides."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rankzero.training.hooks import HookBridge, LoopHooks

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""The hooks of a training batch that both `Callback` and `LightningModule` define."""

_STOCK = {hook: getattr(LightningModule, hook) for hook in BATCH_HOOKS}


def has_any(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that checks whether a mapping contains at least one of the given keys.

    The check runs several times per step. A generated expression that names the keys takes a third of the time of a
    loop over them.
    """
    return eval("lambda found: " + " or ".join(f"{name!r} in found" for name in names))  # type: ignore[no-any-return]


_METHODS = (*BATCH_HOOKS, "optimizer_zero_grad", "backward")
_methods_of = attrgetter(*_METHODS)
_stock_methods = _methods_of(LightningModule)
_sets_method = has_any(*_METHODS)


class BatchHooks:
    """Caller of the hooks of a batch: first those of the callbacks in list order, then the module's (lightning 2.6.6).

    Like Lightning, it looks up the list of callbacks and the methods of callbacks and module at every call, because
    any of them may change in the middle of a batch.

    Args:
        trainer: Trainer whose callbacks and module are called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._module_vars = vars(self._module)
        self._last_callbacks: list[Callback] | None = None
        self._user_callbacks: list[tuple[int, Callback]] = []
        """The callbacks to call, with their indices in the trainer's list. `_needs_no_call` excludes the others."""

    @property
    def have_no_observers(self) -> bool:
        """Whether there are no callbacks to call and the module overrides no method that a batch calls.

        As long as no user code runs in between, this check replaces several hook calls.
        """
        return (
            self._trainer.callbacks == self._last_callbacks  # type: ignore[attr-defined]
            and not self._user_callbacks
            and _methods_of(type(self._module)) == _stock_methods
            and not _sets_method(self._module_vars)
        )

    def call(self, hook: str, *arguments: Any) -> Any:
        """Calls a hook of all callbacks and of the module, and returns the result of the module's hook."""
        if not self.has_observers(hook):
            return None
        module, module_vars = self._module, self._module_vars
        if self._user_callbacks or self._last_callbacks is None:
            previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], hook
            self._call_callbacks(hook, arguments)
            module_vars["_current_fx_name"] = previous_hook
        method = getattr(module, hook)
        if getattr(method, "__func__", None) is _STOCK[hook] or not callable(method):
            return None
        previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], hook
        result = method(*arguments)
        module_vars["_current_fx_name"] = previous_hook
        return result

    def has_observers(self, hook: str) -> bool:
        """Returns whether a hook may have subscribers: callbacks to call, or a module that overrides the hook."""
        if self._trainer.callbacks != self._last_callbacks:  # type: ignore[attr-defined]
            self._update_callbacks()
        return (
            getattr(type(self._module), hook) is not _STOCK[hook]
            or hook in self._module_vars
            or bool(self._user_callbacks)
            or self._last_callbacks is None
        )

    def _update_callbacks(self) -> None:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        self._user_callbacks = [
            (index, callback) for index, callback in enumerate(callbacks) if not _needs_no_call(callback)
        ]
        # A custom `__eq__` could hide the exchange of a callback, so every call then looks up the callbacks again.
        comparable = all(type(callback).__eq__ is object.__eq__ for callback in callbacks)
        self._last_callbacks = list(callbacks) if comparable else None

    def _call_callbacks(self, hook: str, arguments: tuple[Any, ...]) -> None:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        for index, callback in self._user_callbacks:
            self._call_callback(callback, hook, arguments)
            if self._trainer.callbacks != self._last_callbacks:  # type: ignore[attr-defined]
                self._call_from(index + 1, callbacks, hook, arguments)
                return

    def _call_from(self, index: int, callbacks: list[Callback], hook: str, arguments: tuple[Any, ...]) -> None:
        """Calls the callbacks from `index` on; like a `for` loop, it sees changes to the list made meanwhile."""
        while index < len(callbacks):
            if not isinstance(callbacks[index], HookBridge):
                self._call_callback(callbacks[index], hook, arguments)
            index += 1

    def _call_callback(self, callback: Callback, hook: str, arguments: tuple[Any, ...]) -> None:
        method: Callable[..., Any] | None = getattr(callback, hook)
        if callable(method):
            method(self._trainer, self._trainer.lightning_module, *arguments)


def _needs_no_call(callback: Callback) -> bool:
    """Returns whether a callback is Rankzero's and needs no call here, because it overrides none of `BATCH_HOOKS`."""
    if isinstance(callback, HookBridge):
        return True
    return isinstance(callback, LoopHooks) and not any(overrides(callback, hook, Callback) for hook in BATCH_HOOKS)


def overrides(instance: Any, method_name: str, parent: type) -> bool:
    """Returns whether an object or its class replaces a method of `parent`."""
    method = getattr(instance, method_name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(parent, method_name)
