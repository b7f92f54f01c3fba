"""Conditions of the fast path: when it may be used, and which changes are detected."""

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import AdvancedProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from stock import CHANGE_HOOKS, Net, are_equal, assert_same_after_change, log_calls, train

from rankzero.training.fast import replaced
from rankzero.training.fast.conditions import TRANSFER_HOOKS, fallback_reason, has_stock_optimizer_step, needs_transfer


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


@pytest.mark.parametrize("hook", CHANGE_HOOKS)
@pytest.mark.parametrize("change", [set_optimizer_hooks, set_transfer_hook, replace_zero_grad])
def test_new_hooks_of_optimizer_step_and_transfer_take_effect_immediately(change, hook):
    assert_same_after_change(change, hook)


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
    actual, stock = (train(uses_rankzero, SwitchesToManual())[0] for uses_rankzero in (True, False))
    assert are_equal(actual, stock)


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


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
@pytest.mark.parametrize("patch", INSTANCES)
def test_a_wrapped_method_of_an_instance_is_called_as_often_as_by_lightning(patch, hook):
    find_owner, name = INSTANCES[patch]

    def observe(uses_rankzero):
        calls = []

        class WrapsMethod(Callback):
            has_wrapped = False

            def wrap(self, trainer, *arguments):
                if not self.has_wrapped and trainer.global_step in (0, 3):
                    self.has_wrapped = True
                    owner = find_owner(trainer)
                    setattr(owner, name, log_calls(getattr(owner, name), calls, patch))

        setattr(WrapsMethod, hook, WrapsMethod.wrap)
        result, _ = train(uses_rankzero, Net(), [WrapsMethod()], max_epochs=1, limit_val_batches=0)
        return result, calls

    (actual, calls), (stock, stock_calls) = observe(True), observe(False)
    assert are_equal(actual, stock)
    assert calls == stock_calls or (patch == "profiler.profile" and len(calls) >= len(stock_calls))
    assert stock_calls


@pytest.fixture
def trainer():
    """Trainer after one batch of training with Rankzero's loop."""
    return train_one_batch(Net())


def train_one_batch(module, **settings):
    return train(True, module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, **settings)[1]


FETCHER = _PrefetchDataFetcher()


def test_plain_training_needs_no_fallback(trainer):
    assert fallback_reason(trainer, FETCHER) is None


def turn_manual(trainer, monkeypatch):
    monkeypatch.setattr(trainer.lightning_module, "automatic_optimization", False)


def skip_backward(trainer, monkeypatch):
    monkeypatch.setattr(trainer.fit_loop, "_skip_backward", True)


def set_profiler(trainer, monkeypatch):
    trainer.profiler = AdvancedProfiler()


def set_method_of_profiler(trainer, monkeypatch):
    trainer.profiler.start = print


def set_strategy(trainer, monkeypatch):
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", Trainer(accelerator="cpu", logger=False).strategy)
    trainer.strategy.connect(Net())


def replace_advance(trainer, monkeypatch):
    monkeypatch.setattr(_TrainingEpochLoop, "advance", print)


def replace_four_methods(trainer, monkeypatch):
    for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"):
        monkeypatch.setattr(_LoggerConnector, name, print)


def change_one_source(trainer, monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["a.b"])


def change_five_sources(trainer, monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["a.b", "a.c"])
    monkeypatch.setitem(vars(replaced.relied_on), "changed", ["a.d", "a.e", "a.f"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (turn_manual, "Net uses manual optimization"),
        (skip_backward, "StochasticWeightAveraging updates batch norm without backward passes"),
        (set_profiler, "AdvancedProfiler measures the parts of Lightning's loop"),
        (set_method_of_profiler, "PassThroughProfiler measures the parts of Lightning's loop"),
        (set_strategy, "the strategy is SingleDeviceStrategy"),
        (replace_advance, "_TrainingEpochLoop.advance was replaced by another function"),
        (replace_four_methods, "_LoggerConnector.update_train_step_metrics was replaced by another function"),
        (change_one_source, ": a.b changed since Rankzero was tested"),
        (change_five_sources, ": a.b, a.c, a.d and 2 more changed since Rankzero was tested"),
    ],
)
def test_fallback_reason_names_the_cause(trainer, monkeypatch, change, reason):
    change(trainer, monkeypatch)
    assert fallback_reason(trainer, FETCHER).endswith(reason)
    assert fallback_reason(trainer, FETCHER).count(",") <= 2


def test_training_step_with_dataloader_iter_needs_a_fallback(trainer):
    assert fallback_reason(trainer, _DataLoaderIterDataFetcher()) == "training_step takes dataloader_iter"


class Steps(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class TwoOptimizers(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


OPTIMIZER_STEPS = {
    "a plain module": (Net, {}, True),
    "bf16": (Net, {"precision": "bf16-mixed"}, True),
    "double": (Net, {"precision": "64-true"}, False),
    "a hook of the optimizer step": (Steps, {}, False),
    "two optimizers": (TwoOptimizers, {}, False),
}


@pytest.mark.parametrize("case", OPTIMIZER_STEPS)
def test_optimizer_step_is_stock_only_with_known_step_and_precision(case):
    make, settings, is_stock = OPTIMIZER_STEPS[case]
    trainer = train_one_batch(make(), **settings)
    assert has_stock_optimizer_step(trainer, trainer.fit_loop.epoch_loop) == is_stock


CHANGES_OF_STEP = {
    "backward of the module": lambda trainer: (trainer.lightning_module, "backward"),
    "backward of the strategy": lambda trainer: (trainer.strategy, "backward"),
    "clipping of the precision plugin": lambda trainer: (trainer.precision_plugin, "_clip_gradients"),
    "run of the loop": lambda trainer: (trainer.fit_loop.epoch_loop.automatic_optimization, "run"),
    "step of the wrapped optimizer": lambda trainer: (trainer.strategy._lightning_optimizers[0], "step"),
    "a hook of the wrapped optimizer": lambda trainer: (trainer.strategy._lightning_optimizers[0], "_on_before_step"),
    "the wrapped optimizer": lambda trainer: (trainer.strategy._lightning_optimizers[0], "_optimizer"),
    "step of the class": lambda trainer: (LightningOptimizer, "step"),
    "clipping of the class": lambda trainer: (Precision, "_clip_gradients"),
}


@pytest.mark.parametrize("change", CHANGES_OF_STEP)
def test_optimizer_step_with_a_replaced_function_is_not_stock(trainer, monkeypatch, change):
    loop = trainer.fit_loop.epoch_loop
    assert has_stock_optimizer_step(trainer, loop)
    monkeypatch.setattr(*CHANGES_OF_STEP[change](trainer), lambda *arguments: None)
    assert not has_stock_optimizer_step(trainer, loop)


CHANGES_OF_TRANSFER = {
    "convert_input": lambda trainer: (trainer.precision_plugin, "convert_input"),
    "batch_to_device": lambda trainer: (trainer.strategy, "batch_to_device"),
    "the strategy's class": lambda trainer: (Strategy, "batch_to_device"),
    "the module's class": lambda trainer: (type(trainer.lightning_module), "_call_batch_hook"),
    **{f"{hook} of the module": lambda trainer, hook=hook: (trainer.lightning_module, hook) for hook in TRANSFER_HOOKS},
    **{f"{hook} of the data": lambda trainer, hook=hook: (trainer.datamodule, hook) for hook in TRANSFER_HOOKS},
}


@pytest.mark.parametrize("change", CHANGES_OF_TRANSFER)
def test_replaced_function_of_the_batch_transfer_requires_the_transfer(trainer, monkeypatch, change):
    trainer.datamodule = LightningDataModule()
    assert not needs_transfer(trainer)
    monkeypatch.setattr(*CHANGES_OF_TRANSFER[change](trainer), lambda *arguments: None)
    assert needs_transfer(trainer)


def test_double_precision_requires_the_transfer():
    assert needs_transfer(train_one_batch(Net(), precision="64-true"))
