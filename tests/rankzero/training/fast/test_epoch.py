"""The fast path through an epoch: changes within an epoch take effect, and metrics match stock Lightning."""

import functools
import sys

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from stock import BATCHES, CHANGED_IN, Net, assert_same_after_change, same, train

from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fast.conditions import TRANSFER_HOOKS
from rankzero.training.fast.epoch import look


def change_accumulation(callback, trainer, module):
    trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize("hook", CHANGED_IN)
def test_changed_accumulation_takes_effect_immediately(hook):
    assert_same_after_change(change_accumulation, hook)


def test_step_makes_no_lightning_hook_calls_without_subscribers():
    called, generic = [], {getattr(call, name).__code__ for name in dir(call) if name.startswith("_call_")}

    def spy(frame, event, argument):
        if event == "call" and frame.f_code in generic:
            called.append(frame.f_locals.get("hook_name", ""))

    sys.setprofile(spy)
    try:
        train(True, Net(), max_epochs=1, limit_val_batches=0)
    finally:
        sys.setprofile(None)
    assert "on_train_epoch_start" in called
    assert not {hook for hook in called if "batch" in hook or "step" in hook or "backward" in hook or "zero" in hook}


class ReadsMetrics(Net):
    """Module that reads metrics in the same step, and from dictionaries that it has stored."""

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
def test_metrics_are_as_current_as_in_lightning(reads):
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


@pytest.fixture
def trainer():
    """Trainer after training on two batches, with its strategy and wrapped optimizer."""
    module = Net()
    train(True, module, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    module.trainer.datamodule = LightningDataModule()
    return module.trainer


REPLACED = {
    "convert_input": lambda trainer: (trainer.precision_plugin, "convert_input"),
    "batch_to_device": lambda trainer: (trainer.strategy, "batch_to_device"),
    "batch_to_device of the class": lambda trainer: (Strategy, "batch_to_device"),
    "training_step of the strategy": lambda trainer: (trainer.strategy, "training_step"),
    "the transfer of the module's class": lambda trainer: (type(trainer.lightning_module), "_call_batch_hook"),
    "profile of the profiler": lambda trainer: (trainer.profiler, "profile"),
    "step of the wrapped optimizer": lambda trainer: (trainer.strategy._lightning_optimizers[0], "step"),
    "log of the module's class": lambda trainer: (LightningModule, "log"),
    "the connector's class": lambda trainer: (_LoggerConnector, "log_metrics"),
    "the loop's class": lambda trainer: (_TrainingEpochLoop, "advance"),
    **{f"{hook} of the module": lambda trainer, hook=hook: (trainer.lightning_module, hook) for hook in TRANSFER_HOOKS},
    **{f"{hook} of the data": lambda trainer, hook=hook: (trainer.datamodule, hook) for hook in TRANSFER_HOOKS},
}


@pytest.mark.parametrize("part", REPLACED)
def test_look_detects_a_replaced_function(trainer, monkeypatch, part):
    before = look(trainer)
    assert look(trainer) == before
    monkeypatch.setattr(*REPLACED[part](trainer), lambda *arguments: None)
    assert look(trainer) != before


@pytest.mark.parametrize("name", ["strategy", "profiler", "datamodule", "automatic_optimization", "_skip_backward"])
def test_look_detects_a_replaced_object(trainer, name):
    before = look(trainer)
    if name == "strategy":
        other = Net()
        train(True, other, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
        trainer._accelerator_connector.strategy = other.trainer.strategy
    elif name == "automatic_optimization":
        trainer.lightning_module.automatic_optimization = False
    elif name == "_skip_backward":
        trainer.fit_loop._skip_backward = True
    else:
        setattr(trainer, name, PassThroughProfiler() if name == "profiler" else LightningDataModule())
    assert look(trainer) != before
