"""Learning rate schedules over a run: constant and cosine, both with a linear warm-up, and one-cycle.

torch's own schedulers require the number of steps as an argument. `Supervised.configure_optimizers` passes it to these
schedules, so that `--epochs 20` is enough on the command line.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


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
