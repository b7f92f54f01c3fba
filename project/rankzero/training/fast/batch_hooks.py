"""Lightning's hooks of a training batch, called as Lightning calls them, without the calls that do nothing."""

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
"""The hooks of a batch that callbacks and modules share."""

_STOCK = {hook: getattr(LightningModule, hook) for hook in BATCH_HOOKS}


def has_any(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that tells whether a mapping has one of some keys.

    It is called several times a step: an expression that names the keys takes a third of the time of a loop over them.
    """
    return eval("lambda found: " + " or ".join(f"{name!r} in found" for name in names))  # type: ignore[no-any-return]


_METHODS = (*BATCH_HOOKS, "optimizer_zero_grad", "backward")
_methods_of = attrgetter(*_METHODS)
_stock_methods = _methods_of(LightningModule)
_sets = has_any(*_METHODS)


class BatchHooks:
    """Calls the hooks of a batch: the callbacks' in their order, then the module's (lightning 2.6.6).

    The list of callbacks and the methods of callbacks and module are looked up at every call, as Lightning does, since
    any of them may change in the middle of a batch.

    Args:
        trainer: The trainer whose callbacks and module are called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._of_module = vars(self._module)
        self._seen: list[Callback] | None = None
        self._users: list[tuple[int, Callback]] = []
        """The callbacks that are not the run's own, with their places in the trainer's list."""

    @property
    def have_no_observers(self) -> bool:
        """Whether there are no user callbacks, and the module overrides no hook that a batch calls.

        One check replaces several hook calls as long as no user code runs between them.
        """
        return (
            self._trainer.callbacks == self._seen  # type: ignore[attr-defined]
            and not self._users
            and _methods_of(type(self._module)) == _stock_methods
            and not _sets(self._of_module)
        )

    def call(self, hook: str, *arguments: Any) -> Any:
        """Calls a hook of all callbacks and of the module; returns what the module's hook returns."""
        if not self.has_observers(hook):
            return None
        module, of_module = self._module, self._of_module
        if self._users or self._seen is None:
            before, of_module["_current_fx_name"] = of_module["_current_fx_name"], hook
            self._call_callbacks(hook, arguments)
            of_module["_current_fx_name"] = before
        method = getattr(module, hook)
        if getattr(method, "__func__", None) is _STOCK[hook] or not callable(method):
            return None
        before, of_module["_current_fx_name"] = of_module["_current_fx_name"], hook
        answer = method(*arguments)
        of_module["_current_fx_name"] = before
        return answer

    def has_observers(self, hook: str) -> bool:
        """Whether a call of this hook would reach any code of the user's."""
        if self._trainer.callbacks != self._seen:  # type: ignore[attr-defined]
            self._look()
        return (
            getattr(type(self._module), hook) is not _STOCK[hook]
            or hook in self._of_module
            or bool(self._users)
            or self._seen is None
        )

    def _look(self) -> None:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        self._users = [(place, callback) for place, callback in enumerate(callbacks) if not _is_own(callback)]
        # Callbacks that compare equal to others could be exchanged without a difference: those are looked up each time.
        comparable = all(type(callback).__eq__ is object.__eq__ for callback in callbacks)
        self._seen = list(callbacks) if comparable else None

    def _call_callbacks(self, hook: str, arguments: tuple[Any, ...]) -> None:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        for place, callback in self._users:
            self._call_one(callback, hook, arguments)
            if self._trainer.callbacks != self._seen:  # type: ignore[attr-defined]
                self._call_from(place + 1, callbacks, hook, arguments)
                return

    def _call_from(self, place: int, callbacks: list[Callback], hook: str, arguments: tuple[Any, ...]) -> None:
        """Calls the callbacks from this place on, as an iteration over a list that changes meanwhile finds them."""
        while place < len(callbacks):
            if not isinstance(callbacks[place], HookBridge):
                self._call_one(callbacks[place], hook, arguments)
            place += 1

    def _call_one(self, callback: Callback, hook: str, arguments: tuple[Any, ...]) -> None:
        method: Callable[..., Any] | None = getattr(callback, hook)
        if callable(method):
            method(self._trainer, self._trainer.lightning_module, *arguments)


def _is_own(callback: Callback) -> bool:
    """Whether a callback belongs to the run itself and implements none of the hooks of a batch."""
    if isinstance(callback, HookBridge):
        return True
    return isinstance(callback, LoopHooks) and not any(overrides(callback, hook, Callback) for hook in BATCH_HOOKS)


def overrides(instance: Any, method_name: str, parent: type) -> bool:
    """Whether an object or its class has a method of its own in place of the parent's."""
    method = getattr(instance, method_name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(parent, method_name)
