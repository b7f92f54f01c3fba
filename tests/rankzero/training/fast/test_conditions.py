import lightning
import pytest
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler

from rankzero.training.fast import replaced
from rankzero.training.fast.conditions import TRANSFER_HOOKS, fallback_reason, has_stock_optimizer_step, needs_transfer
from rankzero.training.fast.epoch import dependencies_of
from stock import ManualNet, Net, differences, log_calls, observe, of_stock, train, with_methods

INSTANCES = [
    *(f"trainer.strategy.{name}" for name in ("backward", "training_step", "optimizer_step", "batch_to_device")),
    *(f"trainer.precision_plugin.{name}" for name in ("convert_input", "backward", "optimizer_step")),
    "trainer.precision_plugin.train_step_context",
    *(f"trainer.lightning_module.{name}" for name in ("log", "backward", "transfer_batch_to_device")),
    *("trainer.lightning_module.optimizers().step", "trainer.optimizers[0].step", "trainer.optimizers[0].zero_grad"),
    *("trainer.profiler.profile", "trainer._logger_connector.log_metrics"),
]
CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector._LoggerConnector"
LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"


def owner_of(path, trainer):
    """Returns the object that has a method, and the method's name."""
    owner, _, name = path.rpartition(".")
    return eval(owner, {"trainer": trainer, "lightning": lightning}), name


def observe_wrapped(uses_rankzero, hook, *names):
    """Trains while methods of instances are wrapped from a hook on; returns the results and the names of all calls."""
    calls = []

    class WrapsMethods(Callback):
        has_wrapped = False

        def wrap(self, trainer, *arguments):
            if not self.has_wrapped and trainer.global_step in (0, 3):
                self.has_wrapped = True
                for name in names:
                    owner, method = owner_of(name, trainer)
                    setattr(owner, method, log_calls(getattr(owner, method), calls, name))

    setattr(WrapsMethods, hook, WrapsMethods.wrap)
    result = observe(uses_rankzero, Net, lambda: [WrapsMethods()], max_epochs=1, limit_val_batches=0)
    return result, calls


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end"])
@pytest.mark.parametrize("name", INSTANCES)
def test_a_wrapped_method_of_an_instance_is_called_as_often_as_by_lightning(name, hook):
    actual, calls = observe_wrapped(True, hook, name)
    stock, stock_calls = of_stock(observe_wrapped, hook, *INSTANCES)
    expected = stock_calls.count(name)
    assert differences(actual, stock) == [] and expected
    assert len(calls) == expected or (name == "trainer.profiler.profile" and len(calls) >= expected)


@pytest.fixture
def trainer():
    """Trainer after one batch of training with Rankzero's loop."""
    return train_one_batch(Net())


def train_one_batch(module, **settings):
    return train(True, module, max_epochs=1, limit_train_batches=1, limit_val_batches=0, **settings)[1]


FETCHER = _PrefetchDataFetcher()


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


def changing(of_loop, others):
    def change(trainer, monkeypatch):
        monkeypatch.setitem(vars(replaced.loop), "changed", of_loop)
        monkeypatch.setitem(vars(replaced.relied_on), "changed", others)

    return change


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
        (changing(["a.b"], []), ": a.b changed since Rankzero was tested"),
        (
            changing(["a.b", "a.c"], ["a.d", "a.e", "a.f"]),
            ": a.b, a.c, a.d and 2 more changed since Rankzero was tested",
        ),
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
