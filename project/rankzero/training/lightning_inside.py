"""Private parts of Lightning (2.6.6) that the training loop replaces, and when it may."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior as block_synchronization
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy_hook
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from torch import Tensor

__all__ = ["Closure", "ClosureResult", "Precision", "block_synchronization", "call_strategy_hook"]

TESTED_VERSIONS = ("2.6.6",)
"""Releases of Lightning with which the training loop is tested; with others, Lightning's own loop trains."""

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""The hooks of a training batch that both `Callback` and `LightningModule` define."""

OPTIMIZER_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STRATEGY_METHODS = (
    *("training_step", "backward", "optimizer_step", "pre_backward", "post_backward", "post_training_step"),
    "batch_to_device",
)
PRECISION_METHODS = (
    *("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step"),
    *("train_step_context", "forward_context", "_wrap_closure", "_after_closure", "_clip_gradients"),
)
"""Each tuple above lists methods that a step skips unless user code overrides or replaces them."""

_methods_of = attrgetter(
    *(*BATCH_HOOKS, *OPTIMIZER_HOOKS, *TRANSFER_HOOKS),
    *("training_step", "configure_gradient_clipping", "lr_scheduler_step"),
)


def overrides(instance: Any, method_name: str, parent: type) -> bool:
    """Returns whether an object or its class replaces a method of `parent`."""
    method = getattr(instance, method_name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(parent, method_name)


def public_state(strategy: Any) -> tuple[Any, ...]:
    """Returns what changes if user code replaces a method of its module, the strategy, the precision or an optimizer.

    This runs in every step. For instances the number of attributes is enough: it grows when a method is replaced.
    """
    module, optimizers = strategy._lightning_module, strategy._lightning_optimizers
    return (
        module._automatic_optimization,
        _methods_of(type(module)),
        len(module.__dict__),
        len(strategy.__dict__),
        len(strategy._precision_plugin.__dict__),
        len(optimizers[0].__dict__) if optimizers else 0,
        optimizers,
    )


def fallback_reason(trainer: Trainer, data_fetcher: Any) -> str | None:
    """Returns why Lightning's own loop has to train, or None if `TrainingLoop` can."""
    module = trainer.lightning_module
    if lightning.__version__ not in TESTED_VERSIONS:
        return f"Rankzero's loop is not tested with lightning {lightning.__version__}"
    if not module.automatic_optimization:
        return f"{type(module).__name__} uses manual optimization"
    if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes dataloader_iter"
    if trainer.fit_loop._skip_backward:
        return "StochasticWeightAveraging updates batch norm without backward passes"
    if type(trainer.profiler) is not PassThroughProfiler:  # type: ignore[attr-defined]
        return f"{type(trainer.profiler).__name__} measures the parts of Lightning's loop"  # type: ignore[attr-defined]
    return None


def has_stock_optimizer_step(trainer: Trainer) -> bool:
    """Returns whether neither the module nor another object replaces a part of Lightning's optimizer step."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    optimizers = strategy._lightning_optimizers
    return (
        module.automatic_optimization
        and not any(overrides(module, hook, LightningModule) for hook in OPTIMIZER_HOOKS)
        and (type(precision) is Precision or (type(precision) is MixedPrecision and precision.scaler is None))
        and vars(strategy).keys().isdisjoint(STRATEGY_METHODS)
        and vars(precision).keys().isdisjoint(PRECISION_METHODS)
        and len(optimizers) == 1
        and type(optimizers[0]).step is LightningOptimizer.step
        and "step" not in vars(optimizers[0])
        and optimizers[0]._on_before_step is optimizers[0]._on_after_step is do_nothing_closure
        and optimizers[0]._optimizer is trainer.optimizers[0]
    )


def needs_transfer(trainer: Trainer) -> bool:
    """Returns whether even a batch of tensors on the run's device has to be converted or passed to a hook."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return (
        overrides(trainer.precision_plugin, "convert_input", Precision)
        or "batch_to_device" in vars(trainer.strategy)
        or any(overrides(trainer.lightning_module, name, LightningModule) for name in TRANSFER_HOOKS)
        or (data is not None and any(overrides(data, hook, LightningDataModule) for hook in TRANSFER_HOOKS))
    )


def is_plain(batch: Any, device: torch.device | None) -> bool:
    """Returns whether a batch is a tensor on `device` (None: the CPU), or a tuple or list of such tensors."""
    for element in batch if type(batch) is tuple or type(batch) is list else (batch,):
        if type(element) is not Tensor or not (element.is_cpu if device is None else element.device == device):
            return False
    return True


def direct_fetch(data_fetcher: Any) -> Callable[[], Any]:
    """Returns a function that reads the next batch; it reads a single loader directly, not through a CombinedLoader."""
    combined = data_fetcher.combined_loader
    cycle = combined._iterator
    if not (
        type(data_fetcher) is _PrefetchDataFetcher
        and data_fetcher.length is not None
        and not data_fetcher.batches
        and type(cycle) is _MaxSizeCycle
        and len(cycle.iterators) == 1
        and combined.iterables is combined.flattened[0]
    ):
        return lambda: next(data_fetcher)[0]
    length = data_fetcher.length

    def fetch() -> Any:
        if data_fetcher.done:
            raise StopIteration
        try:
            # Looked up in each step: a stored reference to the iterator would keep its worker processes alive.
            batch = next(cycle.iterators[0])
        except StopIteration:
            data_fetcher.done = cycle._consumed[0] = True
            raise
        cycle._idx += 1
        data_fetcher.fetched += 1
        data_fetcher.done = data_fetcher.fetched >= length
        return batch

    return fetch
