import lightning
import pytest
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler

from rankzero.training.fast import replaced
from rankzero.training.fast.conditions import TRANSFER_HOOKS, fallback_reason, has_stock_optimizer_step, needs_transfer
from rankzero.training.fast.epoch import dependencies_of
from stock import ManualNet, Net, owner_of, train, with_methods

CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector._LoggerConnector"
LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
FETCHER = _PrefetchDataFetcher()


@pytest.fixture
def trainer():
    """Trainer after one batch of training with Rankzero's loop."""
    return train_one_batch(Net())


def train_one_batch(module, **settings):
    return train(True, module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, **settings)[1]


def test_plain_training_needs_a_fallback_only_with_dataloader_iter(trainer):
    assert fallback_reason(trainer, FETCHER) is None
    assert fallback_reason(trainer, _DataLoaderIterDataFetcher()) == "training_step takes dataloader_iter"


def set_strategy(trainer, monkeypatch):
    monkeypatch.setattr(trainer._accelerator_connector, "strategy", Trainer(accelerator="cpu", logger=False).strategy)
    trainer.strategy.connect(Net())


def setting(path, value):
    return lambda trainer, monkeypatch: monkeypatch.setattr(*owner_of(path, trainer), value)


def replace_four_methods(trainer, monkeypatch):
    for name in ("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics"):
        monkeypatch.setattr(f"{CONNECTOR}.{name}", print)


def change_version(trainer, monkeypatch):
    monkeypatch.setattr(replaced, "IS_LIGHTNING_TESTED", False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (setting("trainer.lightning_module.automatic_optimization", False), "Net uses manual optimization"),
        (setting("trainer.fit_loop._skip_backward", True), "updates batch norm without backward passes"),
        (setting("trainer.profiler", AdvancedProfiler()), "AdvancedProfiler measures the parts of Lightning's loop"),
        (setting("trainer.profiler.start", print), "PassThroughProfiler measures the parts of Lightning's loop"),
        (set_strategy, "the strategy is SingleDeviceStrategy"),
        (setting(f"{LOOP}.advance", print), "_TrainingEpochLoop.advance was replaced by another function"),
        (replace_four_methods, "_LoggerConnector.update_train_step_metrics was replaced by another function"),
        (change_version, f"is not tested with lightning {lightning.__version__}"),
    ],
)
def test_fallback_reason_names_the_cause(trainer, monkeypatch, change, reason):
    change(trainer, monkeypatch)
    assert fallback_reason(trainer, FETCHER).endswith(reason)
    assert fallback_reason(trainer, FETCHER).count(",") <= 2


def take_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
    optimizer.step(closure=optimizer_closure)


OPTIMIZER_STEPS = {
    "a plain module": (Net, {}, True),
    "bf16": (Net, {"precision": "bf16-mixed"}, True),
    "double": (Net, {"precision": "64-true"}, False),
    "a hook of the optimizer step": (with_methods("Steps", optimizer_step=take_step), {}, False),
    "two optimizers": (ManualNet, {}, False),
}


@pytest.mark.parametrize("case", OPTIMIZER_STEPS)
def test_optimizer_step_is_stock_only_with_known_step_and_precision_and_any_precision_requires_the_transfer(case):
    make, settings, is_stock = OPTIMIZER_STEPS[case]
    trainer = train_one_batch(make(), **settings)
    assert has_stock_optimizer_step(trainer, trainer.fit_loop.epoch_loop) == is_stock
    assert needs_transfer(trainer) == ("precision" in settings)


FUNCTIONS = {
    "trainer.precision_plugin.convert_input": "step transfer dependency",
    "trainer.strategy.batch_to_device": "step transfer dependency",
    "lightning.pytorch.strategies.Strategy.batch_to_device": "transfer dependency",
    "type(trainer.lightning_module)._call_batch_hook": "transfer dependency",
    **{f"trainer.lightning_module.{hook}": "transfer dependency" for hook in TRANSFER_HOOKS},
    **{f"trainer.datamodule.{hook}": "transfer dependency" for hook in TRANSFER_HOOKS},
    "trainer.lightning_module.backward": "step dependency",
    "trainer.strategy.backward": "step dependency",
    "trainer.strategy.training_step": "step dependency",
    "trainer.precision_plugin._clip_gradients": "step dependency",
    "lightning.pytorch.plugins.precision.Precision._clip_gradients": "step dependency",
    "trainer.fit_loop.epoch_loop.automatic_optimization.run": "step",
    "trainer.strategy._lightning_optimizers[0].step": "step dependency",
    "lightning.pytorch.core.optimizer.LightningOptimizer.step": "step dependency",
    "trainer.strategy._lightning_optimizers[0]._on_before_step": "step",
    "trainer.strategy._lightning_optimizers[0]._optimizer": "step",
    "trainer.profiler.profile": "dependency",
    "lightning.pytorch.LightningModule.log": "dependency",
    f"{CONNECTOR}.log_metrics": "dependency",
    f"{LOOP}.advance": "dependency",
}
"""Function -> what its replacement changes: `has_stock_optimizer_step`, `needs_transfer` and `dependencies_of`."""
OBJECTS = {
    "trainer._accelerator_connector.strategy": lambda: train_one_batch(Net()).strategy,
    "trainer.profiler": PassThroughProfiler,
    "trainer.datamodule": LightningDataModule,
    "trainer.lightning_module.automatic_optimization": lambda: False,
    "trainer.fit_loop._skip_backward": lambda: True,
}
"""Object -> function that creates another one; the replacement changes `dependencies_of`."""


@pytest.mark.parametrize("name", [*FUNCTIONS, *OBJECTS])
def test_a_replaced_function_or_object_changes_the_conditions_that_depend_on_it(trainer, monkeypatch, name):
    trainer.datamodule = LightningDataModule()

    def conditions():
        has_step = has_stock_optimizer_step(trainer, trainer.fit_loop.epoch_loop)
        return {"step": has_step, "transfer": not needs_transfer(trainer), "dependency": dependencies_of(trainer)}

    before = conditions()
    assert conditions() == before and before["step"] and before["transfer"]
    monkeypatch.setattr(*owner_of(name, trainer), OBJECTS[name]() if name in OBJECTS else lambda *arguments: None)
    after = conditions()
    changed = [effect for effect in before if after[effect] != before[effect]]
    assert changed == FUNCTIONS.get(name, "dependency").split()
