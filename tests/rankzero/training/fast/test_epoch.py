"""What a user's code changes in the middle of an epoch, and what it instruments, counts as in stock Lightning."""

import functools

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core import hooks as core_hooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from stock import BATCHES, Net, every_hook, same, train

from rankzero.training.epoch_loop import EpochLoop


class Counts(Callback):
    """Counts the batches whose end it sees."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.seen.append(("zero", trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, sorted(outputs), trainer.global_step))


class AtBatch(Callback):
    """Changes something once, in a hook of the third batch."""

    def __init__(self, change, hook="on_train_batch_end"):
        self.change, self.done = change, False
        setattr(self, hook, functools.partial(self._look, hook))

    def _look(self, hook, trainer, module, *arguments):
        if trainer.fit_loop.epoch_loop.batch_idx == 2 and not self.done:
            self.done = True
            self.change(self, trainer, module)


def remove_itself(callback, trainer, module):
    trainer.callbacks.remove(callback)


def append_another(callback, trainer, module):
    trainer.callbacks.append(module.extra)


def insert_another(callback, trainer, module):
    trainer.callbacks.insert(trainer.callbacks.index(callback), module.extra)


def exchange_the_list(callback, trainer, module):
    trainer.callbacks = [module.extra, callback]


def remove_all(callback, trainer, module):
    trainer.callbacks.clear()


def exchange_training_step(callback, trainer, module):
    module.training_step = lambda batch, batch_idx: module.loss(batch) * 2


def exchange_training_step_for_one_without_index(callback, trainer, module):
    module.training_step = lambda batch: module.loss(batch) * 3


def set_hooks_on_module(callback, trainer, module):
    module.on_train_batch_start = lambda batch, batch_idx: module.seen.append(("start", batch_idx))
    module.on_after_backward = lambda: module.seen.append(("backward", trainer.global_step))
    module.on_train_batch_end = lambda outputs, batch, batch_idx: module.seen.append(("end", sorted(outputs)))


def set_hook_on_callback(callback, trainer, module):
    module.extra.on_before_backward = lambda trainer, module, loss: module.seen.append(("loss", float(loss)))
    trainer.callbacks.append(module.extra)


def set_hook_on_callback_class(callback, trainer, module):
    trainer.callbacks.append(Late())
    Late.on_train_batch_end = lambda self, *arguments: module.seen.append("late")


def set_optimizer_hooks(callback, trainer, module):
    def step(epoch, batch_idx, optimizer, optimizer_closure=None):
        module.seen.append(("step", batch_idx))
        optimizer.step(closure=optimizer_closure)

    module.optimizer_step = step
    module.backward = lambda loss: (loss * 0.5).backward()


def set_transfer_hook(callback, trainer, module):
    module.on_after_batch_transfer = lambda batch, dataloader_idx: [part * 2 for part in batch]


def exchange_zero_grad(callback, trainer, module):
    type(module).optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: module.seen.append("kept")


def change_accumulation(callback, trainer, module):
    trainer.accumulate_grad_batches = 2


class Late(Callback):
    pass


CHANGES = [value for value in dict(globals()).values() if getattr(value, "__module__", None) == __name__]
CHANGES = [value for value in CHANGES if not isinstance(value, type)]


def observed(ours, change, hook):
    """Everything that can be seen of a run in which a callback changes something in the middle of an epoch."""
    kind = type("Changed", (Net,), {})
    module = kind()
    module.seen, module.extra = [], Counts()
    before, after = Counts(), Counts()
    callbacks = [before, AtBatch(change, hook), after]
    try:
        result, _ = train(ours, module, callbacks)
    finally:
        if "on_train_batch_end" in vars(Late):
            del Late.on_train_batch_end
    return {**result, "module": module.seen, "callbacks": [one.seen for one in (before, after, module.extra)]}


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_middle_of_an_epoch_counts_at_once(change, hook):
    ours, stock = (observed(way, change, hook) for way in (True, False))
    for part in ours:
        assert same(ours[part], stock[part]), part


class TurnsManual(Net):
    """Switches to manual optimization in the middle of an epoch."""

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
    ours, stock = (train(way, TurnsManual())[0] for way in (True, False))
    assert same(ours, stock)


class EqualToAll(Counts):
    """A callback that compares equal to every other one, as dataclasses with the same fields do."""

    def __eq__(self, other):
        return isinstance(other, EqualToAll)

    __hash__ = Callback.__hash__


def test_callbacks_that_compare_equal_are_told_apart():
    def observe(ours):
        first, second = EqualToAll(), EqualToAll()

        def all_gather_object(callback, trainer, module):
            trainer.callbacks[trainer.callbacks.index(first)] = second

        train(ours, Net(), [first, AtBatch(all_gather_object)], max_epochs=1)
        return first.seen, second.seen

    assert observe(True) == observe(False) and observe(True)[1]


PATCHES = {
    "Tensor.backward": (torch.Tensor, "backward"),
    "torch.autograd.backward": (torch.autograd, "backward"),
    "Optimizer.zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "SGD.step": (torch.optim.SGD, "step"),
    "LightningOptimizer.step": (LightningOptimizer, "step"),
    "LightningModule.backward": (LightningModule, "backward"),
    "LightningModule.optimizer_step": (LightningModule, "optimizer_step"),
    "LightningModule.optimizer_zero_grad": (LightningModule, "optimizer_zero_grad"),
    "LightningModule.lr_scheduler_step": (LightningModule, "lr_scheduler_step"),
    "LightningModule.log": (LightningModule, "log"),
    "LightningModule.configure_gradient_clipping": (LightningModule, "configure_gradient_clipping"),
    "LightningModule.on_train_batch_start": (LightningModule, "on_train_batch_start"),
    "Strategy.backward": (Strategy, "backward"),
    "Strategy.optimizer_step": (Strategy, "optimizer_step"),
    "Strategy.batch_to_device": (Strategy, "batch_to_device"),
    "Precision.convert_input": (Precision, "convert_input"),
    "Precision.optimizer_step": (Precision, "optimizer_step"),
    "Precision.backward": (Precision, "backward"),
    "move_data_to_device": (core_hooks, "move_data_to_device"),
    "_call_callback_hooks": (call, "_call_callback_hooks"),
    "_call_strategy_hook": (call, "_call_strategy_hook"),
    "_TrainingEpochLoop.advance": (_TrainingEpochLoop, "advance"),
}


def wrapped(function, calls, name):
    @functools.wraps(function)
    def wrapper(*arguments, **settings):
        calls.append(name)
        return function(*arguments, **settings)

    return wrapper


@pytest.mark.parametrize("when", ["before fit", "in an epoch"])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_function_is_called_as_often_as_by_lightning(patch, when, monkeypatch):
    owner, name = PATCHES[patch]

    def observe(ours):
        calls = []
        with monkeypatch.context() as context:

            def put(*arguments):
                context.setattr(owner, name, wrapped(getattr(owner, name), calls, patch))

            module = Net()
            if patch == "LightningModule.lr_scheduler_step":
                module = Net(schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3), interval="step")
            if when == "before fit":
                put()
                callbacks = []
            else:
                callbacks = [AtBatch(put)]
            result, _ = train(ours, module, [*callbacks, Counts()], max_epochs=1, limit_val_batches=0)
        return result, calls

    (ours, calls), (stock, stock_calls) = observe(True), observe(False)
    assert same(ours, stock)
    assert calls == stock_calls and calls


INSTANCES = {
    "strategy.backward": (lambda trainer: trainer.strategy, "backward"),
    "strategy.training_step": (lambda trainer: trainer.strategy, "training_step"),
    "strategy.optimizer_step": (lambda trainer: trainer.strategy, "optimizer_step"),
    "strategy.batch_to_device": (lambda trainer: trainer.strategy, "batch_to_device"),
    "precision_plugin.convert_input": (lambda trainer: trainer.precision_plugin, "convert_input"),
    "precision_plugin.backward": (lambda trainer: trainer.precision_plugin, "backward"),
    "precision_plugin.optimizer_step": (lambda trainer: trainer.precision_plugin, "optimizer_step"),
    "precision_plugin.train_step_context": (lambda trainer: trainer.precision_plugin, "train_step_context"),
    "self.optimizers().step": (lambda trainer: trainer.lightning_module.optimizers(), "step"),
    "optimizer.step": (lambda trainer: trainer.optimizers[0], "step"),
    "optimizer.zero_grad": (lambda trainer: trainer.optimizers[0], "zero_grad"),
    "module.log": (lambda trainer: trainer.lightning_module, "log"),
    "module.backward": (lambda trainer: trainer.lightning_module, "backward"),
    "module.transfer_batch_to_device": (lambda trainer: trainer.lightning_module, "transfer_batch_to_device"),
    "profiler.profile": (lambda trainer: trainer.profiler, "profile"),
    "connector.log_metrics": (lambda trainer: trainer._logger_connector, "log_metrics"),
}


@pytest.mark.parametrize("when", ["on_train_start", "on_train_batch_end"])
@pytest.mark.parametrize("patch", INSTANCES)
def test_a_wrapped_method_of_an_instance_is_called_as_often_as_by_lightning(patch, when):
    find, name = INSTANCES[patch]

    def observe(ours):
        calls = []

        class Wraps(Callback):
            done = False

            def wrap(self, trainer, *arguments):
                if not self.done and trainer.global_step in (0, 3):
                    self.done = True
                    owner = find(trainer)
                    setattr(owner, name, wrapped(getattr(owner, name), calls, patch))

        setattr(Wraps, when, Wraps.wrap)
        result, _ = train(ours, Net(), [Wraps()], max_epochs=1, limit_val_batches=0)
        return result, calls

    (ours, calls), (stock, stock_calls) = observe(True), observe(False)
    assert same(ours, stock)
    assert calls == stock_calls or (patch == "profiler.profile" and len(calls) >= len(stock_calls))
    assert stock_calls


class KeepsLog(Net):
    """Keeps `self.log` and calls it from other places."""

    def training_step(self, batch, batch_idx):
        log = self.kept = self.log
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: log("gradient", gradient * 2))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept("at the end", float(batch_idx))

    def on_train_epoch_end(self):
        self.kept("of the epoch", 3.0)


def test_a_kept_log_logs_for_the_hook_that_calls_it():
    (ours, trainer), (stock, stock_trainer) = (train(way, KeepsLog()) for way in (True, False))
    assert same(ours, stock)
    keys = [list(one.fit_loop.epoch_loop._results) for one in (trainer, stock_trainer)]
    assert keys[0] == keys[1] and "backward.gradient" in keys[0] and "on_train_batch_end.at the end" in keys[0]


class ReadsMetrics(Net):
    """Reads what was logged, in the same step, and by dictionaries that it holds."""

    def on_train_start(self):
        self.held = self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [{name: float(value) for name, value in held.items()} for held in self.held]


@pytest.mark.parametrize("reads", [True, False])
def test_metrics_are_as_fresh_as_in_lightning(reads):
    def observe(ours):
        module = ReadsMetrics()
        if not reads:
            module.training_step = functools.partial(Net.training_step, module)
        result, _ = train(ours, module, log_every_n_steps=5)
        return result, module.seen

    (ours, seen), (stock, stock_seen) = observe(True), observe(False)
    assert same(ours, stock)
    assert seen == stock_seen and len(seen) == BATCHES * 2 * (4 if reads else 3)


def test_unobserved_metrics_are_updated_only_at_logging_steps(monkeypatch):
    shown = []
    show = EpochLoop.show_metrics
    monkeypatch.setattr(EpochLoop, "show_metrics", lambda self, *reduces: shown.append(1) or show(self, *reduces))
    train(True, Net(), max_epochs=1, log_every_n_steps=4, limit_val_batches=0)
    assert len(shown) == BATCHES // 4


def test_all_hooks_see_the_same_while_callbacks_come_and_go():
    def observe(ours):
        seen = []
        callbacks = [AtBatch(remove_itself), every_hook(seen), AtBatch(append_another, "on_before_zero_grad")]
        module = Net()
        module.extra = Counts()
        result, _ = train(ours, module, callbacks)
        return result, [entry[:4] for entry in seen], module.extra.seen

    assert same(observe(True), observe(False))
