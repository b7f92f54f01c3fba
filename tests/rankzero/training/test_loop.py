import pytest
from lightning.pytorch import Callback
from lightning.pytorch.trainer import call
from torch.utils.data import default_collate

from rankzero.training.epoch_loop import EpochLoop
from stock import BATCHES, AtBatch, Counts, Loaders, Net, assert_equals_stock, calls_of, differences, observe, train


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
    "None as a hook": lambda callback, trainer, module: setattr(trainer.callbacks[-1], "on_train_batch_end", None),
    "the list": lambda callback, trainer, module: setattr(trainer, "callbacks", [module.extra, callback]),
    "hooks on the module": set_hooks_on_module,
    "a hook on a callback": set_hook_on_callback,
    "a hook on the class of a callback": set_hook_on_callback_class,
}


class AtFetch(Loaders):
    """Loaders that call a function while the third batch is collated, between two batches of training."""

    def __init__(self, change, trainer_of):
        super().__init__(collate=self._collate_and_change)
        self.change, self.trainer_of, self.fetched = change, trainer_of, 0

    def _collate_and_change(self, samples):
        self.fetched += 1
        if self.fetched == 3:
            trainer = self.trainer_of()
            self.change(trainer.callbacks[-1], trainer, trainer.lightning_module)
        return default_collate(samples)


def changed_module():
    module = type("Changed", (Net,), {})()
    module.seen = []
    module.extra = Counts(module.seen)
    return module


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_batches_takes_effect_at_the_next_one(change):
    def observe_change(uses_rankzero):
        module = changed_module()
        loaders = AtFetch(CHANGES[change], lambda: module.trainer)
        return observe(uses_rankzero, lambda: module, lambda: [Counts(), Counts()], loaders=loaders)

    assert differences(observe_change(True), observe_change(False)) == []


@pytest.mark.parametrize("change", ["accumulation", "training_step", "optimizer hooks", "zero_grad of the class"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_start"])
def test_a_change_in_a_hook_before_the_step_takes_effect_in_this_step(change, hook):
    arguments = changed_module, lambda: [Counts(), AtBatch(CHANGES[change], hook)]
    assert differences(*(observe(uses_rankzero, *arguments) for uses_rankzero in (True, False))) == []


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


class ReadsMetrics(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metrics in (self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics):
            self.seen.append({name: float(value) for name, value in metrics.items()})
        return loss


def test_metrics_are_as_current_as_in_lightning():
    assert len(assert_equals_stock(observe, ReadsMetrics, log_every_n_steps=5)["seen"][0]) == BATCHES * 2 * 3


def test_unobserved_metrics_are_updated_only_at_logging_steps():
    settings = {"max_epochs": 1, "log_every_n_steps": 4, "limit_val_batches": 0}
    updates = calls_of([EpochLoop.update_trainer_metrics], "self", lambda: train(True, Net(), **settings))
    assert len(updates) == BATCHES // 4
