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
from stock import BATCHES, CHANGE_HOOKS, Net, are_equal, assert_same_after_change, train

from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fast.conditions import TRANSFER_HOOKS
from rankzero.training.fast.epoch import dependencies_of


def change_accumulation(callback, trainer, module):
    trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize("hook", CHANGE_HOOKS)
def test_changed_accumulation_takes_effect_immediately(hook):
    assert_same_after_change(change_accumulation, hook)


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


class ReadsMetrics(Net):
    """Module that reads metrics in the same step, and from dictionaries that it has stored."""

    def on_train_start(self):
        self.stored_metrics = (
            self.trainer.callback_metrics,
            self.trainer.logged_metrics,
            self.trainer.progress_bar_metrics,
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [{name: float(value) for name, value in metrics.items()} for metrics in self.stored_metrics]


@pytest.mark.parametrize("reads", [True, False])
def test_metrics_are_as_current_as_in_lightning(reads):
    def observe(uses_rankzero):
        module = ReadsMetrics()
        if not reads:
            module.training_step = functools.partial(Net.training_step, module)
        result, _ = train(uses_rankzero, module, log_every_n_steps=5)
        return result, module.seen

    (actual, seen), (stock, stock_seen) = observe(True), observe(False)
    assert are_equal(actual, stock)
    assert seen == stock_seen and len(seen) == BATCHES * 2 * (4 if reads else 3)


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


REPLACED_FUNCTIONS = {
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


@pytest.mark.parametrize("change", REPLACED_FUNCTIONS)
def test_dependencies_include_each_function(trainer, monkeypatch, change):
    before = dependencies_of(trainer)
    assert dependencies_of(trainer) == before
    monkeypatch.setattr(*REPLACED_FUNCTIONS[change](trainer), lambda *arguments: None)
    assert dependencies_of(trainer) != before


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
