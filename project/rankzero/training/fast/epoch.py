"""The fast path through an epoch: Lightning's loop over batches without hook calls that have no subscriber."""

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from sys import getrefcount
from time import monotonic
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core import hooks as core_hooks
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from torch import Tensor

from rankzero.distributed.monitoring.activity import FORWARD, HOOK
from rankzero.training.fast.batch_hooks import BatchHooks, has_any, overrides
from rankzero.training.fast.conditions import (
    MODULE_METHODS,
    PRECISION_METHODS,
    STRATEGY_METHODS,
    TRANSFER_HOOKS,
    has_stock_optimizer_step,
    needs_transfer,
)
from rankzero.training.fast.log import FastLog
from rankzero.training.hooks import TICK_SECONDS, Subscribers
from rankzero.training.metrics.epoch_averages import UNSHARED_REFCOUNT, Results, trainer_metrics_of
from rankzero.training.step import OptimizerStep
from rankzero.training.strategies import RunStrategy, shares_from

_methods_of_module = attrgetter(*MODULE_METHODS)
_methods_of_strategy = attrgetter(*STRATEGY_METHODS)
_methods_of_precision = attrgetter(*PRECISION_METHODS)
_functions_of_call = attrgetter("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
_functions_of_loop = attrgetter("advance", "update_lr_schedulers")
_methods_of_connector = attrgetter("on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics")
_module_sets_method = has_any(*(name for name in MODULE_METHODS if name != "log"))  # FastLog sets "log" itself
_data_sets_hook = has_any(*TRANSFER_HOOKS)


class FastEpoch:
    """Fast replacement for `_TrainingEpochLoop.advance` and everything that it calls (lightning 2.6.6).

    An instance is valid only for the overridden hooks, plugins and replaced functions that it found when it was
    created. Once `is_current` is false, a new instance is needed.

    Args:
        loop: The loop over the batches of an epoch.
        subscribers: The subscribers to Rankzero's hooks.
        data_fetcher: Source of the batches.
    """

    def __init__(self, loop: Any, subscribers: Subscribers, data_fetcher: _DataFetcher) -> None:
        self.loop = loop
        self.trainer, self.data_fetcher = loop.trainer, data_fetcher
        self.module: LightningModule = self.trainer.lightning_module
        self.strategy = cast(RunStrategy, self.trainer.strategy)
        self.connector, self.results = self.trainer._logger_connector, cast(Results, loop.results)
        self.activity, self.record = loop.activity, loop.record
        self.progress, self._total = loop.batch_progress, loop.batch_progress.total
        self._current = loop.batch_progress.current
        self.hooks = BatchHooks(self.trainer)
        self.log = FastLog(self.trainer, self.strategy, self.results)
        self.step: OptimizerStep | None = None
        if has_stock_optimizer_step(self.trainer, loop):
            self.step = OptimizerStep(self.trainer, self.strategy, loop, self.hooks, self.log, self.activity)
        self._fetch = _fetch_from(data_fetcher)
        self._next_share = shares_from(data_fetcher.combined_loader.flattened)
        self._on_logging_step, self._on_batch_done = (
            subscribers.methods["on_logging_step"],
            subscribers.methods["on_batch_done"],
        )
        self._on_tick, self._next_tick = subscribers.methods["on_tick"], 0.0
        self._on_interval_end = subscribers.methods["on_interval_end"]
        self._needs_transfer = needs_transfer(self.trainer)
        self._device = None if self.strategy.root_device.type == "cpu" else self.strategy.root_device
        self._overrides_scheduler_step = overrides(self.module, "lr_scheduler_step", LightningModule)
        self._dependencies = dependencies_of(self.trainer)

    @property
    def is_current(self) -> bool:
        """Whether everything that the fast path depends on is unchanged since this instance was created."""
        return dependencies_of(self.trainer) == self._dependencies

    def train_on_next(self) -> None:
        """Trains on the next batch.

        Raises:
            StopIteration: No batch is left, or `on_train_batch_start` returned -1.
        """
        loop, trainer, hooks = self.loop, self.trainer, self.hooks
        connector, results = self.connector, self.results
        current, total, activity = self._current, self._total, self.activity
        activity.begin_batch(loop.global_step)
        batch = self._fetch()
        self.progress.is_last_batch = self.data_fetcher.done
        if self._needs_transfer or not _is_plain(batch, self._device):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        batch_idx = current.ready
        current.ready += 1
        total.ready += 1
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        outputs: Any = None
        if batch is None:
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            if self.record.is_due:
                activity.enter(HOOK)
                for method in self._on_logging_step:
                    method(trainer)
            is_unobserved = hooks.have_no_observers
            if not is_unobserved:
                activity.enter(HOOK)
            result = None if is_unobserved else hooks.call("on_train_batch_start", batch, batch_idx)
            self.strategy.share = self._next_share()
            if result == -1:
                self._skip_rest_of_epoch()
            current.started += 1
            total.started += 1
            outputs = self._optimize(batch, batch_idx, is_unobserved)
        activity.enter(HOOK)
        current.processed += 1
        total.processed += 1
        self._update_schedules(batch_idx)
        for method in self._on_batch_done:
            method(trainer, batch, batch_idx)
        if (now := monotonic()) >= self._next_tick or self.progress.is_last_batch:
            self._next_tick = now + TICK_SECONDS
            for method in self._on_tick:
                method(trainer, batch, batch_idx)
        hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        results.batch = results.batch_size = None
        if trainer.should_stop and loop.agreements:
            loop.agreements.agree_on_stop()
        current.completed += 1
        total.completed += 1
        if self._logs():
            connector.log_metrics(self.loop.update_trainer_metrics()["log"])
        elif max(map(getrefcount, trainer_metrics_of(connector))) > UNSHARED_REFCOUNT:
            self.loop.update_trainer_metrics()
        if self.record.is_due and not self.accumulates:
            for method in self._on_interval_end:
                method(trainer)

    def end_step(self) -> None:
        """Finishes a batch after which no validation is due: steps plateau schedulers and counts the optimizer step."""
        for config in self.strategy.lr_scheduler_configs:
            if config.reduce_on_plateau:
                self.loop.update_lr_schedulers("step", update_plateau_schedulers=True)
                break
        if not self.accumulates:
            self.loop._batches_that_stepped += 1

    def _optimize(self, batch: Any, batch_idx: int, is_unobserved: bool) -> Any:
        # A user's `on_train_batch_start` may have changed the optimization since the check before this batch.
        is_current = is_unobserved or not self.hooks.has_observers("on_train_batch_start") or self.is_current
        if self.step is not None and is_current:
            return self.step.run(batch, batch_idx, self.accumulates)
        self.activity.enter(FORWARD)
        arguments = self.loop._build_kwargs(OrderedDict(), batch, batch_idx)
        if self.module.automatic_optimization:
            outputs = self.loop.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, arguments)
        else:
            outputs = self.loop.manual_optimization.run(arguments)
        self.record.add_outputs(outputs, batch)
        return outputs

    @property
    def accumulates(self) -> bool:
        """Whether the optimizer step of the last batch needs more batches."""
        return bool(self.trainer.accumulate_grad_batches > 1 and self.loop._should_accumulate())

    def _skip_rest_of_epoch(self) -> None:
        loop = self.loop
        self.progress.increment_by(0, is_last_batch=True)
        self.progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        raise StopIteration

    def _update_schedules(self, batch_idx: int) -> None:
        """Steps the learning rate schedulers, except those that monitor a metric."""
        loop = self.loop
        if self._overrides_scheduler_step:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        elif not self.accumulates:
            counts = loop.scheduler_progress
            for config in self.strategy.lr_scheduler_configs:
                if (
                    config.interval == "step"
                    and not config.reduce_on_plateau
                    and (batch_idx + 1) % config.frequency == 0
                ):
                    counts.increment_ready()
                    config.scheduler.step()  # type: ignore[call-arg]
                    counts.increment_completed()
        if self.progress.is_last_batch or self.progress.current.ready == self.trainer.num_training_batches:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _logs(self) -> bool:
        """Returns whether the last batch ends a logging interval."""
        if self.accumulates:
            return False
        trainer = self.trainer
        interval = trainer.log_every_n_steps
        is_due = interval and (trainer.should_stop or (self.loop._batches_that_stepped + 1) % interval == 0)
        return bool(is_due or trainer.fast_dev_run)


def _is_plain(batch: Any, device: torch.device | None) -> bool:
    """Returns whether a batch is a tensor on `device` (None: the CPU), or a tuple or list of such tensors."""
    for element in batch if type(batch) is tuple or type(batch) is list else (batch,):
        if type(element) is not Tensor or not (element.is_cpu if device is None else element.device == device):
            return False
    return True


def _fetch_from(data_fetcher: _DataFetcher) -> Callable[[], Any]:
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


def dependencies_of(trainer: Trainer) -> tuple[Any, ...]:
    """Returns everything that the fast path depends on and that user code may change in the middle of an epoch.

    This runs in every step and therefore reads attributes directly, not through properties. For Lightning's own
    objects the number of attributes is enough: it grows when a method is replaced on an instance.
    """
    strategy: Any = trainer._accelerator_connector.strategy
    module, precision = strategy._lightning_module, strategy._precision_plugin
    profiler, data = trainer.profiler, trainer.datamodule  # type: ignore[attr-defined]
    optimizer = strategy._lightning_optimizers[0] if strategy._lightning_optimizers else None
    module_type, module_vars = type(module), module.__dict__
    return (
        strategy,
        id(module_vars),
        precision,
        profiler,
        data,
        module._automatic_optimization,
        module_type.automatic_optimization,
        trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward,
        _functions_of_call(call),
        _functions_of_loop(_TrainingEpochLoop),
        core_hooks.move_data_to_device,
        _methods_of_module(module_type),
        _methods_of_strategy(type(strategy)),
        _methods_of_strategy(Strategy),
        _methods_of_precision(type(precision)),
        _methods_of_connector(_LoggerConnector),
        _module_sets_method(module_vars),
        len(strategy.__dict__),
        len(precision.__dict__),
        len(profiler.__dict__),
        optimizer is None or (optimizer, type(optimizer).step, "step" in optimizer.__dict__),
        data is None or _data_sets_hook(data.__dict__),
    )
