"""Logs the learning rate to TensorBoard and other loggers."""

from lightning.pytorch import Trainer

from rankzero.training.hooks import LoopCallback


class LearningRate(LoopCallback):
    """Logs `train/lr` (`train/lr-1`, ... for further optimizers and parameter groups) at the logging interval.

    Unlike Lightning's LearningRateMonitor, it needs no schedule and does not add the rate to the run's metrics.
    """

    def __init__(self) -> None:
        self._logged_step = -1

    def on_logging_step(self, trainer: Trainer) -> None:
        if trainer.global_step == self._logged_step or not trainer.loggers:  # once per step, at the first micro-batch
            return
        self._logged_step = trainer.global_step
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups if "lr" in group]
        rates_by_name = {
            f"train/lr-{number}" if number else "train/lr": float(rate) for number, rate in enumerate(rates)
        }
        if rates_by_name:
            for logger in trainer.loggers:
                logger.log_metrics(rates_by_name, trainer.global_step)
