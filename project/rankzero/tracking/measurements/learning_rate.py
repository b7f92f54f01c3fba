"""Learning rates as series."""

from collections.abc import Iterable

from torch.optim import Optimizer


def learning_rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Returns `train/lr`, and `train/lr-1`, ... for further parameter groups and optimizers.

    Unlike Lightning's LearningRateMonitor, this needs no schedule, and does not add the rates to the run's metrics.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups if group.get("lr") is not None]  # an optimizer may choose its own rate
    return {f"train/lr-{number}" if number else "train/lr": float(rate) for number, rate in enumerate(rates)}
