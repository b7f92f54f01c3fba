"""The fast path through an epoch: changes within an epoch take effect, and metrics match stock Lightning."""

import sys

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call

from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fast.epoch import dependencies_of
from stock import BATCHES, AtBatch, Counts, Net, assert_equals_stock, differences, observe, train


def change_accumulation(callback, trainer, module):
    trainer.accumulate_grad_batches = 2


def replace_training_step(callback, trainer, module):
    module.training_step = lambda batch, batch_idx: module.loss(batch) * 2


def replace_training_step_without_index(callback, trainer, module):
    module.training_step = lambda batch: module.loss(batch) * 3


def set_optimizer_hooks(callback, trainer, module):
    def step(epoch, batch_idx, optimizer, optimizer_closure=None):
        module.seen.append(("step", batch_idx))
        optimizer.step(closure=optimizer_closure)

    module.optimizer_step = step
    module.backward = lambda loss: (loss * 0.5).backward()


def set_transfer_hook(callback, trainer, module):
    module.on_after_batch_transfer = lambda batch, dataloader_idx: [tensor * 2 for tensor in batch]


def replace_zero_grad(callback, trainer, module):
    type(module).optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: module.seen.append("kept")


def remove_itself(callback, trainer, module):
    trainer.callbacks.remove(callback)


def append_another(callback, trainer, module):
    trainer.callbacks.append(module.extra)


def insert_another(callback, trainer, module):
    trainer.callbacks.insert(trainer.callbacks.index(callback), module.extra)


def replace_list(callback, trainer, module):
    trainer.callbacks = [module.extra, callback]


def set_hooks_on_module(callback, trainer, module):
    module.on_train_batch_start = lambda batch, batch_idx: module.seen.append(("start", batch_idx))
    module.on_after_backward = lambda: module.seen.append(("backward", trainer.global_step))
    module.on_train_batch_end = lambda outputs, batch, batch_idx: module.seen.append(("end", sorted(outputs)))


def set_hook_on_callback(callback, trainer, module):
    module.extra.on_before_backward = lambda trainer, module, loss: module.seen.append(("loss", float(loss)))
    trainer.callbacks.append(module.extra)


def set_hook_on_callback_class(callback, trainer, module):
    late = type("Late", (Callback,), {})
    trainer.callbacks.append(late())
    late.on_train_batch_end = lambda self, *arguments: module.seen.append("late")


CHANGES = [
    *(change_accumulation, replace_training_step, replace_training_step_without_index),
    *(set_optimizer_hooks, set_transfer_hook, replace_zero_grad),
    *(remove_itself, append_another, insert_another, replace_list),
    *(set_hooks_on_module, set_hook_on_callback, set_hook_on_callback_class),
]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_middle_of_an_epoch_takes_effect_immediately(change, hook):
    def make_module():
        module = type("Changed", (Net,), {})()
        module.seen = []
        module.extra = Counts(module.seen)
        return module

    def make_callbacks():
        return [Counts(), AtBatch(change, hook), Counts()]

    actual, stock = (observe(uses_rankzero, make_module, make_callbacks) for uses_rankzero in (True, False))
    assert differences(actual, stock) == []


class HasExtra(Net):
    def __init__(self):
        super().__init__()
        self.extra = Counts()
        self.seen = self.extra.seen


def test_all_hooks_are_called_as_by_lightning_while_callbacks_change():
    def make_callbacks():
        return [AtBatch(remove_itself), AtBatch(append_another, "on_before_zero_grad")]

    assert_equals_stock(observe, HasExtra, make_callbacks, has_every_hook=True)


class SwitchesToManual(Net):
    """Module that switches to manual optimization in the middle of an epoch."""

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
    called_hooks, codes_of_calls = [], {getattr(call, name).__code__ for name in dir(call) if name.startswith("_call_")}

    def record_call(frame, event, argument):
        if event == "call" and frame.f_code in codes_of_calls:
            called_hooks.append(frame.f_locals.get("hook_name", ""))

    sys.setprofile(record_call)
    try:
        train(True, Net(), max_epochs=1, limit_val_batches=0)
    finally:
        sys.setprofile(None)
    assert "on_train_epoch_start" in called_hooks
    assert not {
        hook for hook in called_hooks if "batch" in hook or "step" in hook or "backward" in hook or "zero" in hook
    }


class StoresMetrics(Net):
    """Module that reads metrics from dictionaries that it has stored."""

    def on_train_start(self):
        trainer, self.seen = self.trainer, []
        self.stored_metrics = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [{name: float(value) for name, value in metrics.items()} for metrics in self.stored_metrics]


class ReadsMetrics(StoresMetrics):
    """Module that also reads metrics in the same step."""

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
    update = EpochLoop.update_trainer_metrics
    monkeypatch.setattr(
        EpochLoop, "update_trainer_metrics", lambda self, *reduces: updates.append(1) or update(self, *reduces)
    )
    train(True, Net(), max_epochs=1, log_every_n_steps=4, limit_val_batches=0)
    assert len(updates) == BATCHES // 4


@pytest.fixture
def trainer():
    """Trainer after training on two batches, with its strategy and wrapped optimizer."""
    module = Net()
    train(True, module, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    module.trainer.datamodule = LightningDataModule()
    return module.trainer


@pytest.mark.parametrize("name", ["strategy", "profiler", "datamodule", "automatic_optimization", "_skip_backward"])
def test_dependencies_include_each_object(trainer, name):
    before = dependencies_of(trainer)
    if name == "strategy":
        other_module = Net()
        train(True, other_module, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
        trainer._accelerator_connector.strategy = other_module.trainer.strategy
    elif name == "automatic_optimization":
        trainer.lightning_module.automatic_optimization = False
    elif name == "_skip_backward":
        trainer.fit_loop._skip_backward = True
    else:
        setattr(trainer, name, PassThroughProfiler() if name == "profiler" else LightningDataModule())
    assert dependencies_of(trainer) != before
