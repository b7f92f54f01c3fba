"""The training loop: fetch, transfer, hooks, forward, backward, optimizer step, schedules, log.

It does for each batch what Lightning's `_TrainingEpochLoop.advance` (2.6) and its callees do, without hook calls that
have no subscriber. `epoch_loop.py` chooses it before the first batch of an epoch and ends each step after it.
"""

from collections import OrderedDict
from contextlib import nullcontext
from time import monotonic
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from rankzero.distributed.monitoring.activity import BACKWARD, FORWARD, HOOK, OPTIMIZER
from rankzero.distributed.torch_inside import backward, stepper, zero_gradients
from rankzero.sampling.loader import samples_in
from rankzero.training import lightning_inside as stock
from rankzero.training.hooks import TICK_SECONDS, BatchHooks, Subscribers
from rankzero.training.metrics.epoch_averages import Results
from rankzero.training.metrics.step_log import StepLog
from rankzero.training.strategies import OneProcess, RunStrategy, shares_from


class TrainingLoop:
    """Trains on the batches of an epoch.

    Hooks, callbacks and methods that user code adds or replaces take effect at the next batch.
    """

    def __init__(self, loop: Any, subscribers: Subscribers, data_fetcher: Any) -> None:
        trainer = loop.trainer
        self.loop, self.trainer, self.data_fetcher = loop, trainer, data_fetcher
        self.module: LightningModule = trainer.lightning_module
        self._module_vars = vars(self.module)
        self.strategy = cast(RunStrategy, trainer.strategy)
        self.connector, self.results = stock.logger_connector(trainer), cast(Results, loop.results)
        self._connector_vars = vars(self.connector)
        self.activity, self.record, self.progress = loop.activity, loop.record, loop.batch_progress
        self.log = StepLog(trainer, self.results)
        methods = subscribers.methods
        self._on_logging_step, self._on_batch_done = methods["on_logging_step"], methods["on_batch_done"]
        self._on_tick, self._on_interval_end, self._next_tick = methods["on_tick"], methods["on_interval_end"], 0.0
        self._fetch = stock.direct_fetch(data_fetcher)
        self._next_share = shares_from(data_fetcher.combined_loader.flattened)
        self._device = None if self.strategy.root_device.type == "cpu" else self.strategy.root_device
        self._batch: tuple[Any, ...] = ()
        self._batch_idx, self._accumulates = 0, False
        self._may_be_weighted = getattr(self.strategy, "is_weighted", False) is not False
        self._outputs: dict[str, Any] | None = None
        self._find_methods()

    def _find_methods(self) -> None:
        """Looks up the hooks and methods that user code has set."""
        trainer, module = self.trainer, self.module
        self._callbacks, self._wrappers = list(trainer.callbacks), stock.lightning_optimizers(module)
        self._strategy_state = stock.public_state(self.strategy, self._wrappers)
        self.hooks = BatchHooks(trainer)
        self._observed = self.hooks.observed
        self._needs_transfer = stock.needs_transfer(trainer)
        self._steps_itself = stock.has_stock_optimizer_step(trainer)
        if self._steps_itself:
            self._optimizer = trainer.optimizers[0]
            self._take_step = stepper(self._optimizer)
        # DDP and mixed precision run `training_step` through the strategy; a compiled step replaces both.
        is_bare = type(self.strategy) is OneProcess and type(trainer.precision_plugin) is stock.Precision
        self._step_owner: Any = module if is_bare and self.strategy.model is module else self.strategy
        self._backward, compiled = backward, self.loop.compiled_step
        self._takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._clip_gradients = stock.gradient_clipper(trainer.precision_plugin)
        self._clips = stock.overrides(module, "configure_gradient_clipping", LightningModule)
        if compiled and self._steps_itself:
            is_observed = self._clips or trainer.gradient_clip_val or self.hooks.may_change_gradients
            compiled.prepare(self._step_owner, self._optimizer, bool(is_observed))
            self._step_owner, self._take_step, self._backward = compiled, compiled.take_step, compiled.backward
        self._overrides_schedules = stock.overrides(module, "lr_scheduler_step", LightningModule)

    @property
    def _is_current(self) -> bool:
        """Whether user code has added or replaced no callback or method since the last look-up."""
        state = stock.public_state(self.strategy, self._wrappers)
        return self.trainer.callbacks == self._callbacks and state == self._strategy_state

    def _call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook, if that reaches user code."""
        if self._observed[hook]:
            self.hooks.call(hook, *arguments)

    def train_on_next(self) -> None:
        """Trains on the next batch.

        Raises:
            StopIteration: No batch is left, or `on_train_batch_start` returned -1.
        """
        trainer, progress = self.trainer, self.progress
        self.activity.begin_batch(self.loop.global_step)
        batch = self._fetch()
        if not self._is_current:
            self._find_methods()
        progress.is_last_batch = self.data_fetcher.done
        if self._needs_transfer or not stock.is_plain(batch, self._device):
            batch = stock.transferred(trainer, batch)
        batch_idx = progress.current.ready
        progress.increment_ready()
        self._connector_vars[stock.FIRST_BATCH] = self._connector_vars[stock.FIRST_BATCH] is None
        self.results.batch, self.results.batch_size, self.results.dataloader_idx = batch, None, None
        if batch is not None:
            self._begin(batch, batch_idx)
        self._accumulates = trainer.accumulate_grad_batches > 1 and self.loop.should_accumulate()
        if batch is None:
            outputs = None
            text = "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            self.loop.warning_cache.warn(text)
        else:
            progress.increment_started()
            outputs = self._optimize(batch, batch_idx)
        self.activity.enter(HOOK)
        progress.increment_processed()
        self._step_schedules(batch_idx)
        self._end(outputs, batch, batch_idx)
        progress.increment_completed()
        self._log_metrics()

    def _begin(self, batch: Any, batch_idx: int) -> None:
        """Calls the hooks before a batch, and reads this rank's share of the batch."""
        if self.record.is_due:
            self.activity.enter(HOOK)
            for method in self._on_logging_step:
                method(self.trainer)
        response = None
        if self._observed["on_train_batch_start"]:
            self.activity.enter(HOOK)
            response = self.hooks.call("on_train_batch_start", batch, batch_idx)
            if not self._is_current:
                self._find_methods()
        self.strategy.share = self._next_share()
        if response == -1:  # skip the rest of the epoch
            self.progress.increment_by(0, is_last_batch=True)
            self.progress.increment_processed()
            self.loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self.loop.is_complete:
                self.loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            raise StopIteration

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        """Takes the optimizer step, or only accumulates gradients; returns the outputs for `on_train_batch_end`."""
        if not self._steps_itself:
            return self._optimize_by_lightning(batch, batch_idx)
        self._batch, self._batch_idx = (batch, batch_idx) if self._takes_batch_idx else (batch,), batch_idx
        self._outputs = None
        if self._accumulates:
            strategy = self.strategy
            with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext():
                self._pass()
        else:
            counts = self.loop.automatic_optimization.optim_progress.optimizer.step
            counts.increment_ready()
            module_vars = self._module_vars
            hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "optimizer_step"
            self._take_step(self._closure)
            module_vars["_current_fx_name"] = hook
            counts.increment_completed()
        self._batch = ()
        return self._take_outputs(batch)

    def _optimize_by_lightning(self, batch: Any, batch_idx: int) -> Any:
        """Takes the optimizer step as Lightning does, because user code overrides a part of it."""
        self.activity.enter(FORWARD)
        arguments = OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_batch_idx else OrderedDict(batch=batch)
        if self.module.automatic_optimization:
            outputs = self.loop.automatic_optimization.run(self.trainer.optimizers[0], batch_idx, arguments)
        else:
            outputs = self.loop.manual_optimization.run(arguments)
        self.record.add_outputs(outputs, batch)
        return outputs

    def _closure(self) -> Tensor | None:
        """Computes the gradients for the optimizer's `step`; returns the detached loss."""
        trainer, loss = self.trainer, self._pass()
        self.activity.enter(OPTIMIZER)
        if self.record.is_due and self.record.is_enabled:
            self.record.measure_gradients(self._optimizer)
        self._call("on_before_optimizer_step", self._optimizer)
        if self._clips or trainer.gradient_clip_val:
            limits = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            self._clip_gradients(self.module, self._optimizer, *limits)
        return loss

    def _pass(self) -> Tensor | None:
        """Runs the forward and the backward pass; returns the detached loss."""
        if not torch.is_grad_enabled():  # the optimizer called the closure without enabling gradients
            with torch.enable_grad():
                return self._pass()
        self.activity.enter(FORWARD)
        module_vars = self._module_vars
        hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "training_step"
        with self.log:
            output = self._step_owner.training_step(*self._batch)
        module_vars["_current_fx_name"] = hook
        loss = self._loss_of(output)
        if self._batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._zero_gradients()
        if loss is None:
            text = "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            stock.Closure.warning_cache.warn(text)
            return None
        self.activity.enter(BACKWARD)
        share = self.strategy.share
        if share.loss_weight != 1 or self._may_be_weighted or self.strategy.weight is not None:
            loss = self.strategy.scale_loss(loss)
            self._may_be_weighted = self.strategy.is_weighted is not False
        self._call("on_before_backward", loss)
        hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "backward"
        self._backward(loss)
        module_vars["_current_fx_name"] = hook
        if self._observed["on_after_backward"]:
            self.activity.enter(HOOK)
            self.hooks.call("on_after_backward")
        if share.has_empty_rank:  # otherwise DDP has already averaged the gradients
            self.strategy.post_backward(loss)
        return loss.detach()

    def _loss_of(self, output: Any) -> Tensor | None:
        """Returns the loss of a micro-batch, with its graph, and stores the outputs for `on_train_batch_end`."""
        batches_per_step = self.trainer.accumulate_grad_batches
        if type(output) is Tensor:
            self.strategy.weight = None
            loss = output if batches_per_step == 1 else output / batches_per_step
            copies = self._observed["on_train_batch_end"]
            self._outputs = {"loss": loss.detach().clone() if copies else loss}
            return loss
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported."
                " It is recommended that you rewrite your training logic to avoid having to skip the step in the first"
                " place."
            )
        self.strategy.weigh(output)
        result = stock.ClosureResult.from_training_step_output(output, batches_per_step)
        self._outputs = result.asdict() if result.closure_loss is not None else {}
        return result.closure_loss

    def _zero_gradients(self) -> None:
        counts, module_vars = self.loop.automatic_optimization.optim_progress.optimizer.zero_grad, self._module_vars
        counts.increment_ready()
        self._call("on_before_zero_grad", self._optimizer)
        counts.increment_started()
        hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "optimizer_zero_grad"
        zero_gradients(self._optimizer)
        module_vars["_current_fx_name"] = hook
        counts.increment_completed()

    def _take_outputs(self, batch: Any) -> dict[str, Any]:
        """Returns the outputs for `on_train_batch_end`, and records the loss."""
        if self._outputs is None:
            stock.Closure(self._closure).consume_result()  # type: ignore[arg-type]  # raises Lightning's error
        outputs, self._outputs = self._outputs or {}, None
        if outputs and self.record.is_enabled:
            batches_per_step = self.trainer.accumulate_grad_batches  # by which the loss is divided
            loss = outputs["loss"] if batches_per_step == 1 else outputs["loss"] * batches_per_step
            self.record.add_loss(loss, samples_in(batch, self.strategy.share))
        return outputs

    def _step_schedules(self, batch_idx: int) -> None:
        """Steps the learning rate schedulers, except those that monitor a metric."""
        loop, batches = self.loop, batch_idx + 1
        if self._overrides_schedules:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        elif not self._accumulates:
            for config in self.strategy.lr_scheduler_configs:
                if config.interval == "step" and not config.reduce_on_plateau and batches % config.frequency == 0:
                    loop.scheduler_progress.increment_ready()
                    config.scheduler.step()  # type: ignore[call-arg]
                    loop.scheduler_progress.increment_completed()
        if loop.is_complete:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Calls the hooks after a batch, and agrees on a stop that they have requested."""
        trainer = self.trainer
        for method in self._on_batch_done:
            method(trainer, batch, batch_idx)
        if (now := monotonic()) >= self._next_tick or self.progress.is_last_batch:
            self._next_tick = now + TICK_SECONDS
            for method in self._on_tick:
                method(trainer, batch, batch_idx)
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        self.results.batch = self.results.batch_size = None
        if trainer.should_stop and self.loop.agreements:
            self.loop.agreements.agree_on_stop()

    def _log_metrics(self) -> None:
        """Logs the metrics of a step that ends a logging interval."""
        if self._accumulates:
            return
        trainer = self.trainer
        interval = trainer.log_every_n_steps
        is_due = interval and (trainer.should_stop or (self.loop.steps_done + 1) % interval == 0)
        if is_due or trainer.fast_dev_run:
            self.connector.log_metrics(self.loop.update_trainer_metrics()["log"])
        if self.record.is_due:
            for method in self._on_interval_end:
                method(trainer)
