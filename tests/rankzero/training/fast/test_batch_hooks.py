import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from rankzero.distributed.monitoring.activity import Activity
from rankzero.training.fast.batch_hooks import BATCH_HOOKS, BatchHooks, has_any, overrides
from rankzero.training.hooks import HookBridge, LoopCallback
from rankzero.training.metrics.interval_record import IntervalRecord
from stock import AtBatch, Counts, Net, assert_equals_stock, observe


class EqualToAll(Counts):
    """Callback that compares equal to every other instance, as dataclasses with the same fields do."""

    def __eq__(self, other):
        return isinstance(other, EqualToAll)

    __hash__ = Callback.__hash__


def two_equal_callbacks():
    """Returns a callback that a third one replaces by a callback that compares equal."""
    first, second = EqualToAll(), EqualToAll()

    def replace_first(callback, trainer, module):
        trainer.callbacks[trainer.callbacks.index(first)] = second

    replaces = AtBatch(replace_first)
    replaces.seen = second.seen
    return [first, replaces]


def test_callbacks_that_compare_equal_are_distinguished():
    first, second = assert_equals_stock(observe, Net, two_equal_callbacks, max_epochs=1)["seen"]
    assert first and second


def loop_callback_with(hook):
    return type("Implements", (LoopCallback,), {hook: lambda self, *arguments: None})()


def attached_trainer(module=None, *callbacks):
    """Returns a trainer, and the module that is attached to the trainer."""
    module = module or LightningModule()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.callbacks[:] = [HookBridge(print, Activity(), IntervalRecord(trainer)), *callbacks]
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer, module


def observers(hooks):
    """Returns the hooks whose calls reach user code."""
    return {hook for hook in BATCH_HOOKS if hooks.has_observers(hook)}


def module_overriding(*names):
    return type("Overrides", (LightningModule,), {name: lambda self, *arguments: None for name in names})()


@pytest.mark.parametrize(
    ("module", "callbacks", "observed"),
    [
        (None, [], set()),
        (None, [loop_callback_with("on_step_done")], set()),
        (None, [loop_callback_with("on_after_backward")], set(BATCH_HOOKS)),
        (None, [Callback()], set(BATCH_HOOKS)),
        (None, [EqualToAll()], set(BATCH_HOOKS)),
        (module_overriding("on_after_backward"), [loop_callback_with("on_step_done")], {"on_after_backward"}),
        (module_overriding("on_train_batch_start", "on_train_batch_end"), [], {BATCH_HOOKS[0], BATCH_HOOKS[-1]}),
        (module_overriding("on_train_epoch_end", "training_step"), [], set()),
    ],
)
def test_observers_are_the_hooks_that_reach_user_code(module, callbacks, observed):
    trainer, _ = attached_trainer(module, *callbacks)
    hooks = BatchHooks(trainer)
    assert observers(hooks) == observed
    assert hooks.have_no_observers == (not observed)


def test_added_or_removed_methods_and_callbacks_change_observers_immediately():
    trainer, module = attached_trainer(module_overriding())
    hooks = BatchHooks(trainer)
    assert not observers(hooks) and hooks.have_no_observers
    for owner in (module, type(module)):
        for name in (*BATCH_HOOKS, "optimizer_zero_grad", "backward"):
            setattr(owner, name, lambda *arguments: None)
            assert not hooks.have_no_observers and observers(hooks) == {name} & set(BATCH_HOOKS), (owner, name)
            delattr(owner, name)
            assert not observers(hooks) and hooks.have_no_observers, (owner, name)
    trainer.callbacks.append(Callback())
    assert not hooks.have_no_observers and observers(hooks) == set(BATCH_HOOKS)
    trainer.callbacks.pop()
    assert not observers(hooks) and hooks.have_no_observers


def test_has_any_finds_any_of_its_keys():
    contains_any = has_any("a", "b c", "it's")
    assert not contains_any({}) and not contains_any({"c": 1})
    assert contains_any({"a": None}) and contains_any({"b c": 0, "x": 1}) and contains_any({"it's": 2})


def test_overrides_compares_with_the_parent_method():
    module = LightningModule()
    assert not overrides(module, "backward", LightningModule)
    assert overrides(module_overriding("backward"), "backward", LightningModule)
    module.backward = None  # Lightning would not call it
    assert not overrides(module, "backward", LightningModule)
    module.backward = lambda loss: None
    assert overrides(module, "backward", LightningModule)
    module.backward = LightningModule.backward.__get__(module)
    assert not overrides(module, "backward", LightningModule)
    assert not overrides(object(), "backward", LightningModule)
