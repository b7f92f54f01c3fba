"""Reports a run that trains nothing: with weights or a loss that are not finite, or without a loss."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.messages import RunError, few, print_error
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback

NOT_FINITE = "the weights are not finite"


class FiniteWeights(LoopCallback):
    """Reports weights that are NaN or infinite, keeps them out of checkpoints, and stops the run if requested.

    A step costs nothing more: rank zero examines the loss of a logging interval, which it reads anyway. It examines the
    weights only after a loss that is not finite, in the thread that writes a checkpoint, and at the end. So a step that
    the scaler of 16-mixed skips is no problem. All ranks must have this callback.

    Attributes:
        problem: Why the run trains nothing, and since which step; None without a problem. Only on rank zero.
    """

    def __init__(self, channel: ControlChannel, stops: bool) -> None:
        self._channel, self._stops = channel, stops
        self.problem: str | None = None
        self._is_final = self._has_finite_checkpoint = False
        self._ignored: frozenset[str] = frozenset()
        self._bad_intervals = self._first_step = self._first_epoch = 0

    def on_ready(self, trainer: Trainer) -> None:
        self._module = trainer.lightning_module
        self.problem, self._is_final, self._bad_intervals = None, False, 0
        self._first_step, self._first_epoch = trainer.global_step, fit_loop_of(trainer).epochs_done
        self._has_finite_checkpoint = trainer.ckpt_path is not None
        self._ignored = frozenset(_not_finite(_weights(self._module)))  # such as a mask of -inf

    def check_interval(self, trainer: Trainer, step: int, loss: float, samples: float, origin: str = "") -> None:
        """Examines the sum of the losses of an interval's samples over all ranks. Only rank zero calls this.

        `origin` states where the loss was first not finite, such as `first in step 3 on rank 1`; empty if unknown.
        """
        if not samples:
            self._check_that_losses_exist(trainer, step, is_over=False)
            return
        if math.isfinite(loss):
            self._bad_intervals = 0
            if not (self._is_final and self._stops):
                self.problem, self._is_final = None, False
            return
        self._bad_intervals += 1
        first = max(step - fit_loop_of(trainer).epoch_loop.record.interval, self._first_step) + 1
        where = f"steps {first:,} to {step:,}" if first < step else f"step {step:,}"
        if self._report_broken(_weights(self._module), f"since {where}" + f" (the loss {origin})" * bool(origin)):
            return
        if self._bad_intervals > 1 or not getattr(trainer.precision_plugin, "scaler", None):
            self._report(
                f"the loss of {where} is NaN or infinite{f' ({origin})' * bool(origin)}; the weights are still finite"
            )

    def accepts(self, weights: Mapping[str, Any], step: int) -> bool:
        """Returns whether to write a checkpoint.

        It is not written if its weights are not finite and an earlier one's are, nor if the run stops because no step
        has trained them.
        """
        if self._stops and self._has_no_loss(step):
            return False
        if self._report_broken(weights.items(), f"at step {step:,}"):
            return not (self._has_finite_checkpoint or self._stops)
        self._has_finite_checkpoint = True
        return True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Examines a run that ended before its first logging step, or soon after its last one. All ranks must call."""
        step, may_report = trainer.global_step, trainer.is_global_zero and not self._is_final
        if may_report and not self._report_broken(_weights(pl_module), f"at step {step:,}"):
            self._check_that_losses_exist(trainer, step, is_over=True)
        self.end_if_final(trainer)

    def end_if_final(self, trainer: Trainer) -> None:
        """Raises a RunError on all ranks if the run trains nothing, cannot recover, and stops. All ranks must call."""
        ends = self._is_final and self._stops
        own = f"{self.problem}. {self._advice(self.problem)}" if self.problem and ends else None
        if (problem := trainer.strategy.broadcast(own)) is None:
            return
        if trainer.world_size == 1:
            self._channel.forget_stop()
        raise RunError(problem)

    def _check_that_losses_exist(self, trainer: Trainer, step: int, is_over: bool) -> None:
        """Reports a `training_step` that has never returned a loss; in the first epoch, it may still return one."""
        if self._has_no_loss(step):
            text = f"training_step has returned None in every step up to step {step:,}, so nothing is trained"
            self._report(text, is_final=is_over or fit_loop_of(trainer).epochs_done > self._first_epoch)

    def _has_no_loss(self, step: int) -> bool:
        module, record = self._module, fit_loop_of(self._module.trainer).epoch_loop.record
        has_none = record.is_enabled and step > self._first_step and not record.total_samples
        return bool(has_none and module.automatic_optimization and module.trainer.optimizers)

    def _report_broken(self, tensors: Iterable[tuple[str, Any]], when: str) -> bool:
        """Reports the weights among these tensors that are no longer finite; returns whether there are any."""
        examined = {_plain(name) for name, _ in _weights(self._module)} - self._ignored
        names = _not_finite((name, tensor) for name, tensor in tensors if _plain(name) in examined)
        if names:
            self._report(f"{NOT_FINITE} {when}: NaN or infinity in {few(names)}", is_final=True)
        return bool(names)

    def _report(self, text: str, is_final: bool = False) -> None:
        if self.problem is not None and self._is_final >= is_final:
            return
        self.problem, self._is_final = text, is_final
        if not (is_final and self._stops):
            print_error(f"warning: {text}. {self._advice(text)}")
            logging.getLogger("rankzero").warning(text)
        else:
            self._channel.request_stop(NOT_FINITE if text.startswith(NOT_FINITE) else "nothing is trained")

    def _advice(self, problem: str) -> str:
        choice = "--on_nan warn trains on" if self._stops else "--on_nan stop ends such a run"
        if "None" in problem:
            return f"Return the loss; {choice}"
        kept = "Checkpoints with finite weights are kept. " if self._has_finite_checkpoint else ""
        return kept + (
            "Try a lower learning rate or --trainer.gradient_clip_val 1; "
            f"--trainer.detect_anomaly True names the operation; {choice}"
        )


def _weights(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Returns the parameters and the running statistics of batch norms, which have no gradient."""
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            yield name, buffer


def _not_finite(tensors: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns the names of the tensors that contain NaN or infinity."""
    return [
        _plain(name)
        for name, tensor in tensors
        if isinstance(tensor, Tensor) and not is_lazy(tensor) and tensor.is_floating_point() and tensor.itemsize > 1
        # A sum takes a third of the time of `isfinite` for each element, and may overflow.
        if not bool(torch.isfinite(tensor.detach().sum())) and not bool(torch.isfinite(tensor).all())
    ]


def _plain(name: str) -> str:
    """Returns the name of a parameter without the prefix that `torch.compile` adds."""
    return name.replace("_orig_mod.", "")
