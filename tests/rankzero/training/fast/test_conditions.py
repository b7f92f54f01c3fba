import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler

from rankzero.training.fast.conditions import TRANSFER_HOOKS, fallback_reason, has_stock_optimizer_step, needs_transfer
from rankzero.training.fast.epoch import dependencies_of
from stock import Net, owner_of, train

CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector._LoggerConnector"
LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
FETCHER = _PrefetchDataFetcher()


@pytest.fixture
def trainer():
    """Trainer after one batch of training with Rankzero's loop."""
    return train_one_batch()


def train_one_batch(**settings):
    return train(True, Net(), max_epochs=1, limit_train_batches=1, limit_val_batches=0, **settings)[1]


@pytest.mark.parametrize(("precision", "is_fast"), [("32-true", True), ("bf16-mixed", True), ("64-true", False)])
def test_only_steps_of_known_precision_are_fast_and_only_others_require_the_transfer(precision, is_fast):
    trainer = train_one_batch(precision=precision)
    assert fallback_reason(trainer, FETCHER) is None
    assert has_stock_optimizer_step(trainer, trainer.fit_loop.epoch_loop) == is_fast
    assert needs_transfer(trainer) != is_fast


def set_strategy(trainer, monkeypatch):
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", Trainer(accelerator="cpu", logger=False).strategy)
    trainer.strategy.connect(Net())


def setting(path, value):
    return lambda trainer, monkeypatch: monkeypatch.setattr(*owner_of(path, trainer), value)


def replace_four_methods(trainer, monkeypatch):
    for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"):
        monkeypatch.setattr(f"{CONNECTOR}.{name}", print)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (setting("trainer.fit_loop._skip_backward", True), "updates batch norm without backward passes"),
        (setting("trainer.profiler.start", print), "PassThroughProfiler measures the parts of Lightning's loop"),
        (set_strategy, "the strategy is SingleDeviceStrategy"),
        (setting(f"{LOOP}.advance", print), "_TrainingEpochLoop.advance was replaced by another function"),
        (replace_four_methods, "_LoggerConnector.update_train_step_metrics was replaced by another function"),
    ],
)
def test_fallback_reason_names_the_cause(trainer, monkeypatch, change, reason):
    change(trainer, monkeypatch)
    assert fallback_reason(trainer, FETCHER).endswith(reason)
    assert fallback_reason(trainer, FETCHER).count(",") <= 2


REPLACED = {
    **{f"trainer.datamodule.{hook}": (lambda: print, "transfer dependency") for hook in TRANSFER_HOOKS},
    "trainer.datamodule": (LightningDataModule, "dependency"),
    "trainer._accelerator_connector.strategy": (lambda: train_one_batch().strategy, "dependency"),
    "trainer.strategy._lightning_optimizers[0]._optimizer": (lambda: None, "step"),
    "trainer.profiler": (PassThroughProfiler, "dependency"),
    "trainer.lightning_module.automatic_optimization": (lambda: False, "dependency"),
    "trainer.fit_loop._skip_backward": (lambda: True, "dependency"),
}
"""Attribute -> function that returns another value, and what depends on the value.

`test_replaced.py` replaces the functions of which a training without a data module consists.
"""


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_attribute_changes_the_conditions_that_depend_on_it(trainer, monkeypatch, name):
    trainer.datamodule = LightningDataModule()

    def conditions():
        has_step = has_stock_optimizer_step(trainer, trainer.fit_loop.epoch_loop)
        return {"step": has_step, "transfer": not needs_transfer(trainer), "dependency": dependencies_of(trainer)}

    before, (make, changed) = conditions(), REPLACED[name]
    assert conditions() == before and before["step"] and before["transfer"]
    monkeypatch.setattr(*owner_of(name, trainer), make())
    after = conditions()
    assert [effect for effect in before if after[effect] != before[effect]] == changed.split()
