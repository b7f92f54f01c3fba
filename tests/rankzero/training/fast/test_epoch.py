from itertools import product

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer import call

from rankzero.distributed.monitoring.activity import Activity
from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fast.batch_hooks import BATCH_HOOKS, BatchHooks
from rankzero.training.hooks import HookBridge
from rankzero.training.metrics.interval_record import IntervalRecord
from stock import (
    BATCHES,
    SILENT,
    AtBatch,
    Counts,
    Net,
    assert_equals_stock,
    calls_of,
    differences,
    log_calls,
    observe,
    train,
)


class EqualCounts(Counts):
    """Callback that compares equal to every other instance, as dataclasses with the same fields do."""

    def __eq__(self, other):
        return isinstance(other, EqualCounts)

    __hash__ = Callback.__hash__


def set_optimizer_hooks(callback, trainer, module):
    def step(epoch, batch_idx, optimizer, optimizer_closure=None):
        module.seen.append(("step", batch_idx))
        optimizer.step(closure=optimizer_closure)

    module.optimizer_step = step
    module.backward = lambda loss: (loss * 0.5).backward()


def set_hooks_on_module(callback, trainer, module):
    def record(*values):
        module.seen.append((*values, module._current_fx_name))

    module.on_train_batch_start = lambda batch, batch_idx: record("start", batch_idx)
    module.on_after_backward = lambda: record("backward", trainer.global_step)
    module.on_train_batch_end = lambda outputs, batch, batch_idx: record("end", sorted(outputs))


def set_hook_on_callback(callback, trainer, module):
    module.extra.on_before_backward = lambda trainer, module, loss: module.seen.append(("loss", float(loss)))
    trainer.callbacks.append(module.extra)


def set_hook_on_callback_class(callback, trainer, module):
    late = type("Late", (Callback,), {})
    trainer.callbacks.append(late())
    late.on_train_batch_end = lambda self, *arguments: module.seen.append("late")


def replace_callback_by_an_equal_one(callback, trainer, module):
    trainer.callbacks[trainer.callbacks.index(callback) - 1] = module.extra


def replace(name, make):
    """Returns a change that sets an attribute of the module to a function, which `make` returns for the module."""
    return lambda callback, trainer, module: setattr(module, name, make(module))


CHANGES = {
    "accumulation": lambda callback, trainer, module: setattr(trainer, "accumulate_grad_batches", 2),
    "training_step": replace("training_step", lambda module: lambda batch, batch_idx: module.loss(batch) * 2),
    "training_step without index": replace("training_step", lambda module: lambda batch: module.loss(batch) * 3),
    "optimizer hooks": set_optimizer_hooks,
    "a transfer hook": replace("on_after_batch_transfer", lambda _: lambda batch, _: [tensor * 2 for tensor in batch]),
    "zero_grad of the class": lambda callback, trainer, module: setattr(
        type(module), "optimizer_zero_grad", lambda *arguments: module.seen.append("kept")
    ),
    "removes itself": lambda callback, trainer, module: trainer.callbacks.remove(callback),
    "appends another": lambda callback, trainer, module: trainer.callbacks.append(module.extra),
    "inserts another": lambda callback, trainer, module: trainer.callbacks.insert(
        trainer.callbacks.index(callback), module.extra
    ),
    "clears the list": lambda callback, trainer, module: trainer.callbacks.clear(),
    "an equal one in place of another": replace_callback_by_an_equal_one,
    "None as a hook": lambda callback, trainer, module: setattr(trainer.callbacks[-1], "on_train_batch_end", None),
    "the list": lambda callback, trainer, module: setattr(trainer, "callbacks", [module.extra, callback]),
    "hooks on the module": set_hooks_on_module,
    "a hook on a callback": set_hook_on_callback,
    "a hook on the class of a callback": set_hook_on_callback_class,
}
HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")


@pytest.mark.parametrize(("change", "hook"), [*product(CHANGES, HOOKS), ("appends another", "on_train_epoch_start")])
def test_a_change_in_the_middle_or_at_the_start_of_an_epoch_takes_effect_immediately(change, hook):
    kind = (
        EqualCounts if "an equal one" in change else Counts
    )  # callbacks that define `__eq__` have a path of their own

    def make_module():
        module = type("Changed", (Net,), {})()
        module.seen = []
        module.extra = kind(module.seen)
        return module

    def make_callbacks():
        return [kind(), AtBatch(CHANGES[change], hook), kind()]

    actual, stock = (observe(uses_rankzero, make_module, make_callbacks) for uses_rankzero in (True, False))
    assert differences(actual, stock) == []


class HasExtra(Net):
    def __init__(self):
        super().__init__()
        self.extra = Counts()
        self.seen = self.extra.seen


def test_all_hooks_are_called_as_by_lightning_while_callbacks_change():
    def make_callbacks():
        return [AtBatch(CHANGES["removes itself"]), AtBatch(CHANGES["appends another"], "on_before_zero_grad")]

    assert_equals_stock(observe, HasExtra, make_callbacks, has_every_hook=True)


class SwitchesToManual(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.current_epoch == 0:
            self.automatic_optimization = batch_idx < 3


def test_manual_optimization_may_begin_in_the_middle_of_an_epoch():
    assert_equals_stock(observe, SwitchesToManual)


def test_step_makes_no_lightning_hook_calls_without_subscribers():
    functions = [getattr(call, name) for name in dir(call) if name.startswith("_call_")]
    hooks = calls_of(functions, "hook_name", lambda: train(True, Net(), max_epochs=1, limit_val_batches=0))
    assert "on_train_epoch_start" in hooks
    assert not [hook for hook in hooks if any(word in hook for word in ("batch", "step", "backward", "zero"))]


class StoresMetrics(Net):
    def on_train_start(self):
        trainer, self.seen = self.trainer, []
        self.stored_metrics = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [{name: float(value) for name, value in metrics.items()} for metrics in self.stored_metrics]


class ReadsMetrics(StoresMetrics):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        return loss


@pytest.mark.parametrize(("make_module", "reads"), [(ReadsMetrics, 4), (StoresMetrics, 3)])
def test_metrics_are_as_current_as_in_lightning(make_module, reads):
    actual = assert_equals_stock(observe, make_module, log_every_n_steps=5)
    assert len(actual["seen"][0]) == BATCHES * 2 * reads


def test_unobserved_metrics_are_updated_only_at_logging_steps(monkeypatch):
    updates = []
    monkeypatch.setattr(EpochLoop, "update_trainer_metrics", log_calls(EpochLoop.update_trainer_metrics, updates, ""))
    train(True, Net(), max_epochs=1, log_every_n_steps=4, limit_val_batches=0)
    assert len(updates) == BATCHES // 4


def observers(hooks):
    """Returns the hooks whose calls reach user code."""
    return {hook for hook in BATCH_HOOKS if hooks.has_observers(hook)}


def test_added_or_removed_methods_and_callbacks_change_observers_immediately():
    trainer, module = Trainer(**SILENT), type("Plain", (LightningModule,), {})()
    trainer.callbacks[:] = [HookBridge(print, Activity(), IntervalRecord(trainer))]
    trainer.strategy.connect(module)
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
