"""Base class of this folder's models: step, loss, metrics and optimizer; and learning rate schedules over a run.

torch's own schedulers require the number of steps as an argument. `Supervised.configure_optimizers` passes it to these
schedules, so that `--epochs 20` is enough on the command line.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanAbsoluteError, Metric
from torchmetrics.classification import MulticlassAccuracy


class Supervised(LightningModule):
    """Supervised model for classification (cross-entropy) or, without classes, regression (mean squared error).

    Validation and test metrics are computed from sums and counts over all ranks, so that they do not depend on the
    number of ranks.

    Args:
        network: Module that maps a batch of inputs to logits of shape `(batch, num_classes)`, or to predictions of
            shape `(batch, out_features)`.
        num_classes: Number of classes; None for a regression.
        optimizer: Creates an optimizer from the parameters: SGD, AdamW or any class path.
        schedule: Creates a learning rate schedule from the optimizer: Constant, Cosine, OneCycle or any class path.
            Schedules of `lightning_modules` step after each optimizer step, torch's schedulers after each epoch.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int | None = None,
        optimizer: OptimizerCallable = lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=5e-4),
        schedule: LRSchedulerCallable = lambda o: Cosine(o),
    ) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"num_classes is {num_classes}; a classifier needs 2 or more")
        # The subclass's arguments too, with the values taken from the data, for `load_from_checkpoint`.
        self.save_hyperparameters(ignore=["network", "optimizer", "schedule"])
        self.network = network
        self.num_classes = num_classes
        self.make_optimizer = optimizer
        self.make_schedule = schedule
        self.scores = nn.ModuleDict({split: self._score() for split in ("val", "test")})

    def _score(self) -> Metric:
        if self.num_classes is None:
            return MeanAbsoluteError()
        return MulticlassAccuracy(self.num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of the network."""
        output: Tensor = self.network(inputs)
        return output

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch.

        Args:
            outputs: Logits of shape `(batch, num_classes)`, or predictions of shape `(batch, out_features)`.
            targets: Classes of shape `(batch,)`, or targets of shape `(batch, out_features)`.
        """
        return F.mse_loss(outputs, targets) if self.num_classes is None else F.cross_entropy(outputs, targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
        # Rankzero logs `train/loss` for every model, as the mean over all samples since the last logging step.
        self.log("train/loss", loss, prog_bar=True, logger=False, batch_size=inputs.shape[0])
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Returns outputs and targets under the names from which Rankzero draws figures."""
        outputs, targets = self._evaluate("val", *batch), batch[1]
        return {"predictions" if self.num_classes is None else "logits": outputs, "targets": targets}

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", *batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the network's outputs, which are logits or predictions, with one row per sample."""
        outputs: Tensor = self(batch[0])
        return outputs

    def _evaluate(self, split: str, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs: Tensor = self(inputs)
        loss, score = self.loss(outputs, targets), cast(Metric, self.scores[split])
        score.update(outputs, targets)
        score_name = "mae" if self.num_classes is None else "accuracy"
        self.log(f"{split}/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(inputs))
        self.log(f"{split}/{score_name}", score, prog_bar=True, batch_size=len(inputs))
        return outputs

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.device.type == "cuda" and type(optimizer) in (SGD, Adam, AdamW):
            for group in optimizer.param_groups:
                if group["fused"] is group["foreach"] is None:  # set here, since Lightning does not clip if it is given
                    group["fused"] = True
        schedule = self.make_schedule(optimizer)
        if isinstance(schedule, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": schedule.monitor}}
        if not isinstance(schedule, Schedule):
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        total_steps = self.trainer.estimated_stepping_batches
        if total_steps != float("inf"):
            schedule.plan(int(total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def required(name: str, value: int | None, model: str, meaning: str) -> int:
    """Returns the value of a model argument that usually comes from the data.

    Raises:
        ValueError: Neither the data nor the command line specifies the value, or it is below 1.
    """
    if value is None:
        raise ValueError(f"{model} needs {name} ({meaning}), and the data module has no such attribute")
    if value < 1:
        raise ValueError(f"{model}: {name} is {value}; it must be 1 or more")
    return value


class Schedule(LRScheduler, ABC):
    """Base class of schedules that set the learning rate in each optimizer step, as a factor of the optimizer's own.

    Args:
        optimizer: Optimizer whose learning rate is scheduled.
        warmup_steps: Number of optimizer steps over which the learning rate rises linearly from nearly zero.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}; it must be 0 or more")
        self.warmup_steps = warmup_steps
        self.total_steps: int | None = None
        super().__init__(optimizer)

    def plan(self, total_steps: int) -> None:
        """Sets the number of optimizer steps of the run."""
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = self.get_lr()

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Returns the factor after the warm-up, for `progress` from 0 to 1 over the rest of the run."""

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rate of each parameter group at this step."""
        return [rate * self._factor_at(self.last_epoch) for rate in self.base_lrs]

    def _factor_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        return self.factor(min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without step counts: a run that resumes with more epochs follows the longer schedule."""
        return {key: value for key, value in super().state_dict().items() if key not in ("total_steps", "warmup_steps")}


class Constant(Schedule):
    """Schedule that keeps the learning rate constant after the warm-up."""

    def factor(self, progress: float) -> float:
        return 1.0


class Cosine(Schedule):
    """Schedule that falls along half a cosine to `final_factor` (Loshchilov and Hutter 2017, without restarts).

    Args:
        optimizer: Optimizer whose learning rate is scheduled.
        warmup_steps: Number of optimizer steps over which the learning rate rises linearly from nearly zero.
        final_factor: Learning rate at the end of the run, as a fraction of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, final_factor: float = 0.0) -> None:
        self.final_factor = final_factor
        super().__init__(optimizer, warmup_steps)

    def factor(self, progress: float) -> float:
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2


class OneCycle(Schedule):
    """Schedule that rises to the optimizer's learning rate and falls to zero along cosines (Smith and Topin 2018).

    Args:
        optimizer: Optimizer whose learning rate is scheduled.
        warmup_fraction: Fraction of the run during which the learning rate rises.
        initial_factor: Learning rate at the beginning, as a fraction of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup_fraction: float = 0.3, initial_factor: float = 0.04) -> None:
        if not 0 < warmup_fraction < 1:
            raise ValueError(f"warmup_fraction is {warmup_fraction}; it must be between 0 and 1")
        self.warmup_fraction, self.initial_factor = warmup_fraction, initial_factor
        super().__init__(optimizer)

    def factor(self, progress: float) -> float:
        if progress < self.warmup_fraction:
            rise = (1 - math.cos(math.pi * progress / self.warmup_fraction)) / 2
            return self.initial_factor + (1 - self.initial_factor) * rise
        return (1 + math.cos(math.pi * (progress - self.warmup_fraction) / (1 - self.warmup_fraction))) / 2
