"""Conditions under which the fast path through an epoch is equivalent to Lightning's own loop."""

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler

from rankzero.training.ddp import DataParallel
from rankzero.training.fast import replaced
from rankzero.training.fast.batch_hooks import overrides
from rankzero.training.strategies import OneProcess

OPTIMIZER_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
TRANSFER_METHODS = (
    *TRANSFER_HOOKS,
    *("_on_before_batch_transfer", "_apply_batch_transfer_handler", "_call_batch_hook"),
)
MODULE_METHODS = (
    *OPTIMIZER_HOOKS,
    *TRANSFER_METHODS,
    *("configure_gradient_clipping", "lr_scheduler_step", "log"),
)
STRATEGY_METHODS = (
    *("training_step", "backward", "optimizer_step", "pre_backward", "post_backward", "post_training_step"),
    "batch_to_device",
)
PRECISION_METHODS = (
    *("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step"),
    *("train_step_context", "forward_context", "_wrap_closure", "_after_closure", "_clip_gradients"),
)
PROFILER_METHODS = ("profile", "start", "stop")
"""Each tuple above lists methods that a step skips unless a class overrides them or a program has replaced them."""


def fallback_reason(trainer: Trainer, data_fetcher: _DataFetcher) -> str | None:
    """Returns why Lightning's own loop has to train, or None if the fast path can."""
    module = trainer.lightning_module
    if not replaced.IS_LIGHTNING_TESTED:
        return f"Rankzero's loop is not tested with lightning {lightning.__version__}"
    if names := replaced.loop.replaced_names:
        return f"{', '.join(names[:3])} was replaced by another function"
    if not module.automatic_optimization:
        return f"{type(module).__name__} uses manual optimization"
    if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes dataloader_iter"
    if trainer.fit_loop._skip_backward:
        return "StochasticWeightAveraging updates batch norm without backward passes"
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is not PassThroughProfiler or not vars(profiler).keys().isdisjoint(PROFILER_METHODS):
        return f"{type(profiler).__name__} measures the parts of Lightning's loop"
    if type(trainer.strategy) not in (OneProcess, DataParallel):
        return f"the strategy is {type(trainer.strategy).__name__}"
    return None


def has_stock_optimizer_step(trainer: Trainer, loop: _TrainingEpochLoop) -> bool:
    """Returns whether the optimizer step is stock Lightning's, neither overridden nor replaced at run time."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    optimizers = strategy._lightning_optimizers
    return (
        replaced.optimization.are_original
        and not any(overrides(module, hook, LightningModule) for hook in OPTIMIZER_HOOKS)
        and (type(precision) is Precision or (type(precision) is MixedPrecision and precision.scaler is None))
        and vars(strategy).keys().isdisjoint(STRATEGY_METHODS)
        and vars(precision).keys().isdisjoint(PRECISION_METHODS)
        and "run" not in vars(loop.automatic_optimization)
        and len(optimizers) == 1
        and type(optimizers[0]).step is LightningOptimizer.step
        and "step" not in vars(optimizers[0])
        and optimizers[0]._on_before_step is optimizers[0]._on_after_step is do_nothing_closure
        and optimizers[0]._optimizer is trainer.optimizers[0]
    )


def needs_transfer(trainer: Trainer) -> bool:
    """Returns whether even a batch of tensors on the run's device has to be converted or passed to a hook."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    return (
        not replaced.transfer.are_original
        or overrides(precision, "convert_input", Precision)
        or "batch_to_device" in vars(strategy)
        or any(overrides(module, name, LightningModule) for name in TRANSFER_METHODS)
        or (data is not None and any(overrides(data, hook, LightningDataModule) for hook in TRANSFER_HOOKS))
    )
