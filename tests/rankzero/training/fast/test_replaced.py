import functools
from itertools import product
from types import ModuleType

import pytest
import torch

from rankzero.training.fast.replaced import Functions
from stock import AtBatch, Counts, Net, differences, log_calls, observe, of_stock, owner_of

CORE, STRATEGY = "lightning.pytorch.core", "lightning.pytorch.strategies.Strategy"
MODULE, PRECISION = f"{CORE}.LightningModule", "lightning.pytorch.plugins.precision.Precision"
SCHEDULED = f"{MODULE}.lr_scheduler_step"
"""This function is called only with a schedule; a schedule hides later replacements of the optimizer's `step`."""
PATCHES = [
    *("torch.Tensor.backward", "torch.autograd.backward", "torch.optim.Optimizer.zero_grad", "torch.optim.SGD.step"),
    *(f"{CORE}.optimizer.LightningOptimizer.step", f"{CORE}.hooks.move_data_to_device"),
    *(f"{MODULE}.{name}" for name in ("backward", "optimizer_step", "optimizer_zero_grad", "log")),
    *(f"{MODULE}.{name}" for name in ("configure_gradient_clipping", "on_train_batch_start", "_call_batch_hook")),
    *(f"{STRATEGY}.{name}" for name in ("backward", "optimizer_step", "batch_to_device")),
    *(f"{PRECISION}.{name}" for name in ("convert_input", "optimizer_step", "backward", "_clip_gradients")),
    *(f"lightning.pytorch.trainer.call.{name}" for name in ("_call_callback_hooks", "_call_strategy_hook")),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop.advance",
]
INSTANCES = [
    *(f"trainer.strategy.{name}" for name in ("backward", "training_step", "optimizer_step", "batch_to_device")),
    *(f"trainer.precision_plugin.{name}" for name in ("convert_input", "backward", "optimizer_step")),
    *(f"trainer.precision_plugin.{name}" for name in ("train_step_context", "_clip_gradients")),
    *(f"trainer.lightning_module.{name}" for name in ("log", "backward", "transfer_batch_to_device")),
    *(f"trainer.lightning_module.on_{when}_batch_transfer" for when in ("before", "after")),
    *("trainer.lightning_module.optimizers().step", "trainer.optimizers[0].step", "trainer.optimizers[0].zero_grad"),
    *("trainer.profiler.profile", "trainer._logger_connector.log_metrics"),
]
AT_START = [
    "trainer.fit_loop.epoch_loop.automatic_optimization.run",
    "trainer.strategy._lightning_optimizers[0]._on_before_step",
]
"""A replacement in the middle of an epoch takes effect in the next one."""


def observe_wrapped(uses_rankzero, hook, *names):
    """Trains with functions that are wrapped before the fit or in a hook; returns results and names of all calls."""
    calls, schedule = [], functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    make_module = functools.partial(Net, schedule=schedule if SCHEDULED in names else None, interval="step")
    with pytest.MonkeyPatch.context() as context:

        def install_wrappers(callback=None, trainer=None, module=None):
            for name in names:
                owner, function = owner_of(name, trainer)
                context.setattr(owner, function, log_calls(getattr(owner, function), calls, name))

        callbacks = [Counts()]
        if hook:
            callbacks.insert(0, AtBatch(install_wrappers, hook))
        else:
            install_wrappers()
        result = observe(uses_rankzero, make_module, lambda: callbacks, max_epochs=1, limit_val_batches=0)
    return result, calls


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        *product([*PATCHES, SCHEDULED], [None, "on_train_batch_end"]),
        *product(INSTANCES, ["on_train_start", "on_train_batch_end"]),
        *product(AT_START, ["on_train_start"]),
    ],
)
def test_a_wrapped_function_is_called_as_often_as_by_lightning(name, hook):
    actual, calls = observe_wrapped(True, hook, name)
    names = next(names for names in (PATCHES, INSTANCES, AT_START, [SCHEDULED]) if name in names)
    stock, stock_calls = of_stock(observe_wrapped, hook, *names)
    expected = stock_calls.count(name)
    assert differences(actual, stock) == [] and expected
    assert len(calls) == expected or (name == "trainer.profiler.profile" and len(calls) >= expected)


class Owner:
    def plain(self):
        return 1

    @staticmethod
    def static():
        return 1

    @classmethod
    def of_class(cls):
        return 1


NAMES = "plain static of_class"


def test_functions_are_original_until_one_is_replaced():
    functions = Functions({Owner: NAMES})
    assert functions.are_original and functions.replaced_names == []
    for name in NAMES.split():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Owner, name, lambda self: 1)
            assert not functions.are_original
            assert functions.replaced_names == [f"{__name__}.Owner.{name}"]
        assert functions.are_original
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Owner, "plain")
        patch.setattr(Owner, "static", print)
        assert not functions.are_original
        assert functions.replaced_names == [f"{__name__}.Owner.{name}" for name in ("plain", "static")]
    module = ModuleType("a.module")
    module.function = print
    functions = Functions({module: "function"})
    module.function = repr
    assert functions.replaced_names == ["a.module.function"]
