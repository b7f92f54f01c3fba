"""The loop over the batches of an epoch: Lightning's, with an end to each step, and no call that nobody listens to.

Lightning (2.6) asks every callback, the module, the strategy and the profiler at some thirty places of a step, whether
or not they have anything to say, and gathers what has been logged each time. That is several times what the step of a
small model costs. Here each epoch finds out once who listens where; the order of what is called, and what comes out, is
Lightning's, to the bit. What is not known to be the same is left to Lightning's own loop, and a line says why.

This is where the inside of a training step is replaced; `project/quick_log.py` is what stands in for `self.log` in it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from project.batch_hooks import Hooks, overrides
from project.logged_metrics import Results
from project.loop_hooks import Listeners
from project.quick_log import QuickLog
from project.quick_torch import run_backward, step_of
from project.sampling.sharding import Sharding
from project.say import show
from project.strategies import DataParallel, OneProcess, RunStrategy

KNOWN = ("2.6.6",)
"""The versions of Lightning whose loop is known to do the same; with any other, its own one trains."""

OPTIMISER_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward")
LOOKING_HOOKS = (*OPTIMISER_HOOKS, "lr_scheduler_step", "configure_gradient_clipping")
"""Hooks in which a module may look at what was logged in the batch before."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class EpochLoop(_TrainingEpochLoop):
    """The loop over the batches of an epoch."""

    sharding: Sharding
    listeners: Listeners

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self._results = self.results = Results()
        self.at_rest = False
        """Whether no batch is half done, nor what belongs to it."""
        self.has_validated = False
        """Whether there was a validation since the last safe point."""
        self._batches: Batches | None = None
        self._told: set[str] = set()

    @property
    def global_step(self) -> int:
        if self._batches is None:
            return super().global_step
        return self.automatic_optimization.optim_progress.optimizer_steps  # asked for several times a step

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that have been trained on."""
        return int(self.batch_progress.current.processed)  # type: ignore[attr-defined]

    @property
    def is_complete(self) -> bool:
        """Whether the epoch's last batch is done."""
        return self._num_ready_batches_reached()

    def reset(self) -> None:
        """Turns to where a checkpoint left off, or to the beginning of an epoch."""
        within, order = self.trainer.fit_loop.restarted_mid_epoch, self.sharding.order
        if not self.is_resuming or (within and not order):
            super().reset()  # an epoch from its beginning; or an order that is not ours, as Lightning carries it on
            return
        self.restarting = False  # nothing is left to be made up for
        if not within:
            super().reset()
            return
        assert order
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()
        if not self.at_rest and self.batches_done <= order.first_batch:
            self._batches_that_stepped += 1  # Lightning counts a step behind the hooks in which it saves
        done = order.first_batch
        vars(self.batch_progress.current).update(ready=done, started=done, processed=done, completed=done)
        self.batch_progress.is_last_batch = done >= self.trainer.num_training_batches

    def run(self, data_fetcher: _DataFetcher) -> None:
        self.reset()
        self.on_run_start(data_fetcher)
        batches = self._batches = self._own_way(data_fetcher)
        try:
            while not (self.done if batches is None or batches.may_be_the_last else False):
                try:
                    self.advance(data_fetcher)
                    self.on_advance_end(data_fetcher)
                except StopIteration:
                    break
                finally:
                    self.on_iteration_done()
            self.settle()
        finally:
            self._batches = None

    def advance(self, data_fetcher: _DataFetcher) -> None:
        self.at_rest = False
        batches = self._batches
        if batches is not None and not self.restarting:
            batches.train_on_next()
            return
        super().advance(data_fetcher)
        if batches is not None:
            batches.take_note()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        batches = self._batches
        if batches is None:
            super().on_advance_end(data_fetcher)
        elif batches.may_validate:
            batches.settle()
            super().on_advance_end(data_fetcher)
        else:
            batches.end_step()
        self.at_rest = True
        if batches.accumulates if batches else self._should_accumulate():
            return
        trainer = self.trainer
        for listen in self.listeners.of["on_step_done"]:
            listen(trainer)
        if not self.is_complete:  # otherwise the epoch's end follows at once
            for listen in self.listeners.of["on_safe_point"]:
                listen(trainer)
            self.has_validated = False

    def come_to_safe_point(self) -> None:
        """Where a run can be saved and can stop."""
        self.listeners.call("on_safe_point")
        self.has_validated = False

    def settle(self) -> None:
        """Brings what is shown of the logged metrics up to the last batch. All ranks must call."""
        if self._batches is not None:
            self._batches.settle()

    def _own_way(self, data_fetcher: _DataFetcher) -> "Batches | None":
        """Our way through an epoch, or None where Lightning's has to be taken."""
        why = why_not(self.trainer, data_fetcher)
        if why and why not in self._told:
            self._told.add(why)
            if lightning.__version__ not in KNOWN:
                rank_zero_warn(f"rankzero: {why}")
            elif self.trainer.is_global_zero:
                show(f"rankzero: a step costs what it costs in Lightning's own loop: {why}")
        return None if why else Batches(self, data_fetcher)

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        validates = bool(super()._should_check_val_fx(data_fetcher))
        self.has_validated |= validates
        return validates

    def _broadcast_sigterm_tensor(self) -> None:
        """Lightning (2.5.2 on) has the ranks agree by a collective, and wait for the device, in every step."""

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "at_rest": self.at_rest}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.at_rest = bool(state_dict.get("at_rest"))


def why_not(trainer: Trainer, data_fetcher: _DataFetcher) -> str | None:
    """Why Lightning's own loop has to train, or None."""
    module = trainer.lightning_module
    if lightning.__version__ not in KNOWN:
        return f"lightning {lightning.__version__} is not known to train as {' or '.join(KNOWN)}, so its own loop does"
    if not module.automatic_optimization:
        return f"{type(module).__name__} optimises by hand"
    if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
        return "training_step takes dataloader_iter"
    if trainer.fit_loop._skip_backward:
        return "StochasticWeightAveraging updates batch norm without backward passes"
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if type(profiler) is not PassThroughProfiler:
        return f"{type(profiler).__name__} measures its parts"
    if type(trainer.strategy) not in (OneProcess, DataParallel):
        return f"the strategy is {type(trainer.strategy).__name__}"
    return None


class Batches:
    """The batches of an epoch, trained on as by `_TrainingEpochLoop.advance` and all that it calls (lightning 2.6.6).

    Made anew for each epoch, as who listens may change between two.

    Args:
        loop: The loop that goes through them.
        data_fetcher: Where they come from.

    Attributes:
        accumulates: Whether the last batch was not the last one of its optimiser step.
    """

    def __init__(self, loop: EpochLoop, data_fetcher: _DataFetcher) -> None:
        self.loop, self.trainer, self.data_fetcher = loop, loop.trainer, data_fetcher
        self.module: LightningModule = self.trainer.lightning_module
        self.strategy = cast(RunStrategy, self.trainer.strategy)
        self.connector = self.trainer._logger_connector
        self.progress = loop.batch_progress
        self.hooks = Hooks(self.trainer)
        self._watches_a_metric = any(config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs)
        looks = self._watches_a_metric or any(overrides(self.module, hook, LightningModule) for hook in LOOKING_HOOKS)
        self.log = QuickLog(self.trainer, self.strategy, loop.results, waits=not (looks or self.hooks.anyone_looks))
        self.step = OptimiserStep(self) if _optimises_plainly(self.trainer, self.module) else None
        self.accumulates = False
        self._next = _next_of(data_fetcher)
        self._loaders = data_fetcher.combined_loader.flattened
        self._on_batch_begun, self._on_batch_done = (
            loop.listeners.of[f"on_batch_{what}"] for what in ("begun", "done")
        )
        self._moves = not _stays_where_it_is(self.trainer, self.module)
        self._validates = loop._should_check_val_epoch()
        self._own_schedules = overrides(self.module, "lr_scheduler_step", LightningModule)
        self._unsettled = False

    def train_on_next(self) -> None:
        """Trains on the next batch.

        Raises:
            StopIteration: There is none, or `on_train_batch_start` has returned -1.
        """
        loop, trainer, progress, hooks = self.loop, self.trainer, self.progress, self.hooks
        connector, results = self.connector, loop.results
        batch = self._next()
        progress.is_last_batch = self.data_fetcher.done
        if self._moves or not _is_plain(batch):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        batch_idx = progress.current.ready
        progress.increment_ready()
        self._unsettled = True
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        outputs: Any = None
        if batch is None:
            self.accumulates = self._should_accumulate()
            loop._warning_cache.warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            for listen in self._on_batch_begun:
                listen(trainer, batch, batch_idx)
            answer = hooks.call("on_train_batch_start", batch, batch_idx)
            self.strategy.take_share(self._loaders)
            if self.strategy.share.idle:  # what a rank without a sample does not log cannot wait for it
                self.log.reduce()
            if answer == -1:
                self._skip_the_rest()
            progress.increment_started()
            self.accumulates = self._should_accumulate()
            outputs = self._optimise(batch, batch_idx)
        progress.increment_processed()
        self._update_schedules(batch_idx)
        for listen in self._on_batch_done:
            listen(trainer, batch, batch_idx)
        hooks.call("on_train_batch_end", outputs, batch, batch_idx)
        results.batch = results.batch_size = None
        progress.increment_completed()
        if self._logs():
            connector.log_metrics(self._show_metrics()["log"])

    def take_note(self) -> None:
        """Goes by what Lightning's own loop has done with a batch."""
        self.accumulates = self._should_accumulate()
        self._unsettled = True

    def end_step(self) -> None:
        """What comes behind a batch that no validation is due behind."""
        if self._watches_a_metric:
            self.loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self.accumulates:
            self.loop._batches_that_stepped += 1

    def settle(self) -> None:
        """Brings what is shown of the logged metrics up to the last batch. All ranks must call."""
        if self._unsettled:
            self._show_metrics()

    def _show_metrics(self) -> Any:
        """Has the last batch's metrics shown, and returns them."""
        self._unsettled = False
        self.log.reduce()
        metrics, connector = self.loop.results.metrics(on_step=True), self.connector
        connector._progress_bar_metrics.update(metrics["pbar"])
        connector._callback_metrics.update(metrics["callback"])
        connector._logged_metrics.update(metrics["log"])
        return metrics

    @property
    def may_be_the_last(self) -> bool:
        """Whether the loop may be done with the last batch."""
        trainer, loop = self.trainer, self.loop
        return (
            self.progress.is_last_batch
            or self.progress.current.ready >= trainer.num_training_batches
            or trainer.should_stop
            or (loop.max_steps != -1 and loop.global_step >= loop.max_steps)
        )

    @property
    def may_validate(self) -> bool:
        """Whether a validation may be due behind the last batch; Lightning then looks closely."""
        trainer, every = self.trainer, self.trainer.val_check_batch
        if trainer.should_stop:
            return True
        if not self._validates:
            return False
        if every is None or every == float("inf") or self.progress.is_last_batch:
            return True
        counts = self.progress.total if trainer.check_val_every_n_epoch is None else self.progress.current
        return counts.ready % every == 0

    def _optimise(self, batch: Any, batch_idx: int) -> Any:
        if self.step is not None:
            return self.step.take(batch, batch_idx)
        arguments = self.loop._build_kwargs(OrderedDict(), batch, batch_idx)
        return self.loop.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, arguments)

    def _should_accumulate(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1 and self.loop._should_accumulate()

    def _skip_the_rest(self) -> None:
        loop = self.loop
        self.progress.increment_by(0, is_last_batch=True)
        self.accumulates = self._should_accumulate()
        self.progress.increment_processed()
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        raise StopIteration

    def _update_schedules(self, batch_idx: int) -> None:
        """Steps the schedules, but for those that watch a metric."""
        loop = self.loop
        if self._own_schedules:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        elif not self.accumulates:
            counts = loop.scheduler_progress
            for config in self.trainer.lr_scheduler_configs:
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
        """Whether the logging interval ends with the last batch."""
        if self.accumulates:
            return False
        trainer = self.trainer
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = every and (trainer.should_stop or (self.loop._batches_that_stepped + 1) % every == 0)
        return bool(due or trainer.fast_dev_run)  # type: ignore[attr-defined]


class OptimiserStep:
    """Forward, backward and the optimiser's step, as by `_AutomaticOptimization` and what it calls (lightning 2.6.6).

    Args:
        batches: Which it is a part of.
    """

    def __init__(self, batches: Batches) -> None:
        self.trainer, self.module, self.strategy = batches.trainer, batches.module, batches.strategy
        self.loop, self.hooks, self.log = batches.loop, batches.hooks, batches.log
        self.batches = batches
        takes = self.loop._build_kwargs(OrderedDict(), None, 0)
        self._takes_batch_idx = "batch_idx" in takes
        self._optimizer: Optimizer | None = None
        alone = type(self.strategy) is OneProcess and type(self.trainer.precision_plugin) is Precision
        self._training_step = self.module.training_step if alone else self.strategy.training_step
        self._clips = overrides(self.module, "configure_gradient_clipping", LightningModule)
        self._wants_outputs = "on_train_batch_end" in self.hooks.of
        self._batch: tuple[Any, ...] = ()
        self._batch_idx = 0
        self._result: ClosureResult | None = None

    def take(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Takes the step, or adds to the gradients where more batches belong to it.

        Returns:
            What `on_train_batch_end` is told of `training_step`'s output, if anybody listens.
        """
        self._batch, self._batch_idx = (batch, batch_idx) if self._takes_batch_idx else (batch,), batch_idx
        if self.batches.accumulates:
            with _block_parallel_sync_behavior(self.strategy):
                self._run_passes()
        else:
            counts = self.loop.automatic_optimization.optim_progress.optimizer.step
            counts.increment_ready()
            of_module = vars(self.module)
            before, of_module["_current_fx_name"] = of_module["_current_fx_name"], "optimizer_step"
            optimizer = self.strategy.optimizers[0]
            if optimizer is not self._optimizer:
                self._optimizer, self._step = optimizer, step_of(optimizer)
            self._step(self._closure)
            of_module["_current_fx_name"] = before
            counts.increment_completed()
        self._batch = ()
        result, self._result = self._result, None
        if result is None:
            raise MisconfigurationException(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step`"
                " hook? It could also happen because the `optimizer.step(optimizer_closure)` call did not execute it"
                " internally."
            )
        return {} if result.loss is None else result.asdict()

    def _closure(self) -> Tensor | None:
        loss = self._run_passes()
        self.hooks.call("on_before_optimizer_step", self.strategy.optimizers[0])
        if self._clips or self.trainer.gradient_clip_val:
            self.trainer.precision_plugin._clip_gradients(
                self.module,
                self.strategy.optimizers[0],
                self.trainer.gradient_clip_val,
                gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
            )
        return loss

    def _run_passes(self) -> Tensor | None:
        """The forward and the backward pass; returns the loss without its graph."""
        if not torch.is_grad_enabled():  # in the step of an optimiser that does not see to it
            with torch.enable_grad():
                return self._run_passes()
        of_module = vars(self.module)
        before, of_module["_current_fx_name"] = of_module["_current_fx_name"], "training_step"
        with self.log:
            output = self._training_step(*self._batch)
        of_module["_current_fx_name"] = before
        loss = self._loss_of(output)
        batches_a_step: int = self.trainer.accumulate_grad_batches
        if self._batch_idx % batches_a_step == 0:
            self._zero_gradients()
        if loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return None
        self._run_backward(loss)
        return loss.detach()

    def _loss_of(self, output: Any) -> Tensor | None:
        batches_a_step: int = self.trainer.accumulate_grad_batches
        if type(output) is Tensor and batches_a_step == 1 and not self._wants_outputs:
            self._result = _NOTHING
            return output
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported."
                " It is recommended that you rewrite your training logic to avoid having to skip the step in the first"
                " place."
            )
        self._result = ClosureResult.from_training_step_output(output, batches_a_step)
        return self._result.closure_loss

    def _zero_gradients(self) -> None:
        optimizer = self.strategy.optimizers[0]
        counts = self.loop.automatic_optimization.optim_progress.optimizer.zero_grad
        counts.increment_ready()
        self.hooks.call("on_before_zero_grad", optimizer)
        counts.increment_started()
        if type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = None
        else:
            of_module = vars(self.module)
            before, of_module["_current_fx_name"] = of_module["_current_fx_name"], "optimizer_zero_grad"
            optimizer.zero_grad()
            of_module["_current_fx_name"] = before
        counts.increment_completed()

    def _run_backward(self, loss: Tensor) -> None:
        loss = self.strategy.weighed(loss)
        self.hooks.call("on_before_backward", loss)
        of_module = vars(self.module)
        before, of_module["_current_fx_name"] = of_module["_current_fx_name"], "backward"
        run_backward(loss)
        of_module["_current_fx_name"] = before
        self.hooks.call("on_after_backward")
        if self.strategy.share.idle:  # otherwise DDP has averaged, and there is nothing to do
            self.strategy.post_backward(loss)


def _optimises_plainly(trainer: Trainer, module: LightningModule) -> bool:
    """Whether nobody has a way of their own to take an optimiser step."""
    precision, optimizers = trainer.precision_plugin, trainer.strategy._lightning_optimizers
    return (
        not any(overrides(module, hook, LightningModule) for hook in OPTIMISER_HOOKS)
        and (type(precision) is Precision or (type(precision) is MixedPrecision and precision.scaler is None))
        and [type(one).step for one in optimizers] == [LightningOptimizer.step]
        and optimizers[0]._optimizer is trainer.optimizers[0]
    )


def _stays_where_it_is(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a batch of tensors on the CPU is trained on as it is."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return (
        trainer.strategy.root_device.type == "cpu"
        and type(trainer.precision_plugin) is Precision
        and not any(overrides(module, hook, LightningModule) for hook in TRANSFER_HOOKS)
        and not (data is not None and any(overrides(data, hook, LightningDataModule) for hook in TRANSFER_HOOKS))
    )


def _is_plain(batch: Any) -> bool:
    """Whether a batch is made of tensors on the CPU and nothing else."""
    if type(batch) is tuple or type(batch) is list:
        return all(type(one) is Tensor and one.is_cpu for one in batch)
    return type(batch) is Tensor and batch.is_cpu


def _next_of(data_fetcher: _DataFetcher) -> Callable[[], Any]:
    """What returns the next batch: the only loader's own iterator, without the layers for several."""
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
    batches: Iterator[Any] = cycle.iterators[0]
    length = data_fetcher.length

    def fetch() -> Any:
        if data_fetcher.done:
            raise StopIteration
        try:
            batch = next(batches)
        except StopIteration:
            data_fetcher.done = cycle._consumed[0] = True
            raise
        cycle._idx += 1
        data_fetcher.fetched += 1
        data_fetcher.done = data_fetcher.fetched >= length
        return batch

    return fetch


_NOTHING = ClosureResult(None)
