"""Forward pass, backward pass and optimizer step, without Lightning's calls that have no effect."""

from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from rankzero.distributed.monitoring.activity import BACKWARD, FORWARD, HOOK, OPTIMIZER, Activity
from rankzero.training.fast.batch_hooks import BatchHooks, overrides
from rankzero.training.fast.conditions import OPTIMIZER_HOOKS
from rankzero.training.fast.log import FastLog
from rankzero.training.fast.torch_calls import fast_backward, fast_step, zero_gradients
from rankzero.training.metrics.interval_record import samples_in
from rankzero.training.strategies import OneProcess, RunStrategy


class OptimizerStep:
    """Fast path for one training batch, equivalent to `_AutomaticOptimization` and its callees (lightning 2.6.6).

    Args:
        trainer: The Trainer.
        strategy: The Trainer's strategy.
        loop: The loop over batches.
        hooks: Lightning's hooks of a batch.
        log: The replacement for `self.log` in `training_step`.
        activity: Receives the phases of the step.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: RunStrategy,
        loop: _TrainingEpochLoop,
        hooks: BatchHooks,
        log: FastLog,
        activity: Activity,
    ) -> None:
        self.trainer, self.strategy, self.loop, self.hooks, self.log = trainer, strategy, loop, hooks, log
        self.activity = activity
        self.module: LightningModule = trainer.lightning_module
        self._module_vars = vars(self.module)
        self._bypasses_strategy = (
            type(strategy) is OneProcess
            and type(trainer.precision_plugin) is Precision
            and strategy.model is self.module
        )
        self._overrides_clipping = overrides(self.module, "configure_gradient_clipping", LightningModule)
        self._inspected_function: Any = None
        self._takes_batch_idx = False
        self._record = loop.record  # type: ignore[attr-defined]
        self._optimizer: Optimizer | None = None
        self._batch: tuple[Any, ...] = ()
        self._batch_idx = 0
        self._output: Any = None
        self._result: ClosureResult | None = None
        self._is_unobserved = False
        """True if the next hooks have no observers; updated each time user code has run."""

    def run(self, batch: Any, batch_idx: int, accumulates: bool) -> dict[str, Any]:
        """Takes the optimizer step, or only accumulates gradients.

        Args:
            batch: The batch.
            batch_idx: Index of the batch in the epoch.
            accumulates: Whether this optimizer step needs further batches.

        Returns:
            The outputs for `on_train_batch_end`; empty if the hook has no observers.
        """
        self._batch = (batch, batch_idx) if self._step_takes_batch_idx() else (batch,)
        self._batch_idx = batch_idx
        if accumulates:
            with _block_parallel_sync_behavior(self.strategy):
                self._run_passes()
        else:
            counts = self.loop.automatic_optimization.optim_progress.optimizer.step
            counts.current.ready += 1
            counts.total.ready += 1
            module_vars = self._module_vars
            previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "optimizer_step"
            optimizer = self.strategy.optimizers[0]
            if optimizer is not self._optimizer:
                self._optimizer, self._step = optimizer, fast_step(optimizer)
            self._step(self._closure)
            module_vars["_current_fx_name"] = previous_hook
            counts.current.completed += 1
            counts.total.completed += 1
        return self._outputs()

    def _step_takes_batch_idx(self) -> bool:
        method = self.module.training_step
        function = getattr(method, "__func__", method)
        if function is not self._inspected_function:
            self._inspected_function = function
            self._takes_batch_idx = "batch_idx" in self.loop._build_kwargs(OrderedDict(), None, 0)
        return self._takes_batch_idx

    def _outputs(self) -> dict[str, Any]:
        result, output, batch = self._result, self._output, self._batch
        self._batch, self._result, self._output = (), None, None
        if result is None:
            raise MisconfigurationException(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step`"
                " hook? It could also happen because the `optimizer.step(optimizer_closure)` call did not execute it"
                " internally."
            )
        record = self._record
        if record.is_enabled and (loss := output if result is _UNOBSERVED else result.loss) is not None:
            batches_per_step: int = self.trainer.accumulate_grad_batches  # by which Lightning has divided the loss
            samples = samples_in(batch[0], self.strategy.share)
            record.add_loss(loss if batches_per_step == 1 else loss * batches_per_step, samples)
        if result is _UNOBSERVED:
            if not self.hooks.has_observers("on_train_batch_end"):
                return {}
            result = ClosureResult.from_training_step_output(output)  # a callback was added during this batch
        return {} if result.loss is None else result.asdict()

    def _closure(self) -> Tensor | None:
        loss = self._run_passes()
        self.activity.enter(OPTIMIZER)
        if self._record.is_due and self._record.is_enabled:
            self._record.measure_gradients(self.strategy.optimizers[0])
        if not self._is_unobserved:
            self.hooks.call("on_before_optimizer_step", self.strategy.optimizers[0])
        if self._overrides_clipping or self.trainer.gradient_clip_val:
            self.trainer.precision_plugin._clip_gradients(
                self.module,
                self.strategy.optimizers[0],
                self.trainer.gradient_clip_val,
                gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
            )
        return loss

    def _run_passes(self) -> Tensor | None:
        """Runs the forward and the backward pass; returns the detached loss."""
        if not torch.is_grad_enabled():  # the optimizer called the closure without enabling gradients
            with torch.enable_grad():
                return self._run_passes()
        self.activity.enter(FORWARD)
        module_vars = self._module_vars
        previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "training_step"
        with self.log:
            output = (self.module if self._bypasses_strategy else self.strategy).training_step(*self._batch)
        module_vars["_current_fx_name"] = previous_hook
        self._is_unobserved = self.hooks.have_no_observers
        loss = self._loss_of(output)
        batches_per_step: int = self.trainer.accumulate_grad_batches
        if self._batch_idx % batches_per_step == 0:
            self._zero_gradients()
        if loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return None
        self._run_backward(loss)
        return loss.detach()

    def _loss_of(self, output: Any) -> Tensor | None:
        batches_per_step: int = self.trainer.accumulate_grad_batches
        is_observed = not self._is_unobserved and self.hooks.has_observers("on_train_batch_end")
        if type(output) is Tensor and batches_per_step == 1 and not is_observed:
            self._result, self._output = _UNOBSERVED, output
            return output
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported."
                " It is recommended that you rewrite your training logic to avoid having to skip the step in the first"
                " place."
            )
        self._result = ClosureResult.from_training_step_output(output, batches_per_step)
        return self._result.closure_loss

    def _zero_gradients(self) -> None:
        optimizer = self.strategy.optimizers[0]
        counts: Any = self.loop.automatic_optimization.optim_progress.optimizer.zero_grad
        current, total = counts.current, counts.total
        current.ready += 1
        total.ready += 1
        if not self._is_unobserved:
            self.hooks.call("on_before_zero_grad", optimizer)
        current.started += 1
        total.started += 1
        module_vars = self._module_vars
        previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "optimizer_zero_grad"
        if not self._is_unobserved and self._is_replaced("optimizer_zero_grad"):
            self.module.optimizer_zero_grad(self.trainer.current_epoch, self._batch_idx, optimizer)
        elif not zero_gradients(optimizer):
            self._is_unobserved = False
        module_vars["_current_fx_name"] = previous_hook
        current.completed += 1
        total.completed += 1

    def _run_backward(self, loss: Tensor) -> None:
        self.activity.enter(BACKWARD)
        if self.strategy.share.loss_weight != 1:
            loss = self.strategy.scale_loss(loss)
        if not self._is_unobserved:
            self.hooks.call("on_before_backward", loss)
        module_vars = self._module_vars
        previous_hook, module_vars["_current_fx_name"] = module_vars["_current_fx_name"], "backward"
        if not self._is_unobserved and self._is_replaced("backward"):
            self.module.backward(loss)
        else:
            fast_backward(loss)
        module_vars["_current_fx_name"] = previous_hook
        self._is_unobserved = self.hooks.have_no_observers
        if not self._is_unobserved:
            self.activity.enter(HOOK)
            self.hooks.call("on_after_backward")
        if self.strategy.share.has_empty_rank:  # otherwise DDP has already averaged the gradients
            self.strategy.post_backward(loss)

    def _is_replaced(self, method: str) -> bool:
        """Whether a hook called within this batch has replaced a method of the module."""
        return method in self._module_vars or getattr(type(self.module), method) is not _STOCK[method]


_STOCK = {method: getattr(LightningModule, method) for method in OPTIMIZER_HOOKS}


_UNOBSERVED = ClosureResult(None)
"""Result of a step whose outputs have no observer."""
