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
from stock import CHANGED_IN, Net, assert_same_after_change, counted, same, train

from rankzero.training.fast import replaced
from rankzero.training.fast.conditions import TRANSFER_HOOKS, fallback_reason, needs_transfer, optimizes_plainly


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


@pytest.mark.parametrize("hook", CHANGED_IN)
@pytest.mark.parametrize("change", [set_optimizer_hooks, set_transfer_hook, exchange_zero_grad])
def test_new_hooks_of_optimizer_step_and_transfer_take_effect_immediately(change, hook):
    assert_same_after_change(change, hook)


class TurnsManual(Net):
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
    ours, stock = (train(way, TurnsManual())[0] for way in (True, False))
    assert same(ours, stock)


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
                    setattr(owner, name, counted(getattr(owner, name), calls, patch))

        setattr(Wraps, when, Wraps.wrap)
        result, _ = train(ours, Net(), [Wraps()], max_epochs=1, limit_val_batches=0)
        return result, calls

    (ours, calls), (stock, stock_calls) = observe(True), observe(False)
    assert same(ours, stock)
    assert calls == stock_calls or (patch == "profiler.profile" and len(calls) >= len(stock_calls))
    assert stock_calls


@pytest.fixture
def trainer():
    """Trainer after one batch of training with Rankzero's loop."""
    return trained(Net())


def trained(module, **settings):
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


def replace_four(trainer, monkeypatch):
    for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"):
        monkeypatch.setattr(_LoggerConnector, name, print)


def change_one(trainer, monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["a.b"])


def change_five(trainer, monkeypatch):
    monkeypatch.setitem(vars(replaced.loop), "changed", ["a.b", "a.c"])
    monkeypatch.setitem(vars(replaced.inner), "changed", ["a.d", "a.e", "a.f"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (turn_manual, "Net uses manual optimization"),
        (skip_backward, "StochasticWeightAveraging updates batch norm without backward passes"),
        (set_profiler, "AdvancedProfiler measures its parts"),
        (set_method_of_profiler, "PassThroughProfiler measures its parts"),
        (set_strategy, "the strategy is SingleDeviceStrategy"),
        (replace_advance, "_TrainingEpochLoop.advance was replaced by another function"),
        (replace_four, "_LoggerConnector.update_train_step_metrics was replaced by another function"),
        (change_one, ": a.b changed since this was tested"),
        (change_five, ": a.b, a.c, a.d and 2 more changed since this was tested"),
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


PLAIN_STEPS = {
    "a plain module": (Net, {}, True),
    "bf16": (Net, {"precision": "bf16-mixed"}, True),
    "double": (Net, {"precision": "64-true"}, False),
    "a hook of the optimizer step": (Steps, {}, False),
    "two optimizers": (TwoOptimizers, {}, False),
}


@pytest.mark.parametrize("case", PLAIN_STEPS)
def test_optimizes_plainly_only_with_known_step_and_precision(case):
    make, settings, is_plain = PLAIN_STEPS[case]
    trainer = trained(make(), **settings)
    assert optimizes_plainly(trainer, trainer.fit_loop.epoch_loop) == is_plain


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
def test_replaced_part_of_a_step_prevents_plain_optimization(trainer, monkeypatch, change):
    loop = trainer.fit_loop.epoch_loop
    assert optimizes_plainly(trainer, loop)
    monkeypatch.setattr(*CHANGES_OF_STEP[change](trainer), lambda *arguments: None)
    assert not optimizes_plainly(trainer, loop)


CHANGES_OF_TRANSFER = {
    "convert_input": lambda trainer: (trainer.precision_plugin, "convert_input"),
    "batch_to_device": lambda trainer: (trainer.strategy, "batch_to_device"),
    "the strategy's class": lambda trainer: (Strategy, "batch_to_device"),
    "the module's class": lambda trainer: (type(trainer.lightning_module), "_call_batch_hook"),
    **{f"{hook} of the module": lambda trainer, hook=hook: (trainer.lightning_module, hook) for hook in TRANSFER_HOOKS},
    **{f"{hook} of the data": lambda trainer, hook=hook: (trainer.datamodule, hook) for hook in TRANSFER_HOOKS},
}


@pytest.mark.parametrize("change", CHANGES_OF_TRANSFER)
def test_replaced_part_of_the_batch_transfer_requires_the_transfer(trainer, monkeypatch, change):
    trainer.datamodule = LightningDataModule()
    assert not needs_transfer(trainer)
    monkeypatch.setattr(*CHANGES_OF_TRANSFER[change](trainer), lambda *arguments: None)
    assert needs_transfer(trainer)


def test_double_precision_requires_the_transfer():
    assert needs_transfer(trained(Net(), precision="64-true"))
