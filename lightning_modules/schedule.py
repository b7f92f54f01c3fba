"""Learning rates over a run: constant, cosine and one-cycle, each with a linear warm-up.

torch's own schedulers need to be told the number of steps; these are told by `Supervised.configure_optimizers`, so that
`--epochs 20` is all that one has to type.
"""

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Schedule(LRScheduler):
    """The learning rate as a factor of the optimiser's own, by optimiser step.

    Args:
        optimizer: Whose learning rate is scheduled.
        warmup_steps: Steps over which it rises linearly from nearly nothing.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}; it has to be 0 or more")
        self.warmup_steps = warmup_steps
        self.total_steps: int | None = None
        super().__init__(optimizer)

    def plan(self, total_steps: int) -> None:
        """Tells how many optimiser steps the run has."""
        self.total_steps = total_steps
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = self.get_lr()

    def factor(self, progress: float) -> float:
        """The factor after the warm-up, for `progress` from 0 to 1 over the rest of the run."""
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each parameter group at this step."""
        return [rate * self._factor_at(self.last_epoch) for rate in self.base_lrs]

    def _factor_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        return self.factor(min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)))

    def state_dict(self) -> dict[str, Any]:
        """All but the plan: a run that is resumed with more epochs follows the longer plan."""
        return {key: value for key, value in super().state_dict().items() if key not in ("total_steps", "warmup_steps")}


class Constant(Schedule):
    """The same learning rate throughout."""

    def factor(self, progress: float) -> float:
        return 1.0


class Cosine(Schedule):
    """Half a cosine down to `final_factor` at the end (Loshchilov and Hutter 2017, without restarts).

    Args:
        optimizer: Whose learning rate is scheduled.
        warmup_steps: Steps over which it rises linearly from nearly nothing.
        final_factor: What is left at the end, as a factor of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, final_factor: float = 0.0) -> None:
        self.final_factor = final_factor
        super().__init__(optimizer, warmup_steps)

    def factor(self, progress: float) -> float:
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2


class OneCycle(Schedule):
    """Up to the optimiser's learning rate and down again in one cycle of cosines (Smith and Topin 2018).

    Args:
        optimizer: Whose learning rate is scheduled.
        warmup_fraction: Share of the run on the way up.
        initial_factor: Where it begins, as a factor of the highest.
    """

    def __init__(self, optimizer: Optimizer, warmup_fraction: float = 0.3, initial_factor: float = 0.04) -> None:
        if not 0 < warmup_fraction < 1:
            raise ValueError(f"warmup_fraction is {warmup_fraction}; it has to be between 0 and 1")
        self.warmup_fraction, self.initial_factor = warmup_fraction, initial_factor
        super().__init__(optimizer)

    def factor(self, progress: float) -> float:
        if progress < self.warmup_fraction:
            rise = (1 - math.cos(math.pi * progress / self.warmup_fraction)) / 2
            return self.initial_factor + (1 - self.initial_factor) * rise
        return (1 + math.cos(math.pi * (progress - self.warmup_fraction) / (1 - self.warmup_fraction))) / 2
