"""Logs the loss, the speed and the resources of training at the logging interval."""

import math
from collections.abc import Callable, Mapping
from time import monotonic

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.runs.directory import RunDirectory
from rankzero.tracking.measurements.exchange import Exchange
from rankzero.tracking.measurements.flop_count import FlopCount, can_count, peak_flops_per_second
from rankzero.tracking.measurements.learning_rate import learning_rates
from rankzero.tracking.measurements.resources import memory_in_use, prepared_batches
from rankzero.tracking.measurements.series import (
    DETAILS_REQUESTED,
    FIRST_GRADIENT,
    GRADIENT_NORM,
    LOSS_SAMPLES,
    LOSS_SUM,
    values_of_ranks,
)
from rankzero.tracking.measurements.step_time import StepTime
from rankzero.tracking.measurements.throughput import Throughput
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import strategy_of

LOSS = "train/loss"
OTHER_LOSS = "train/mean_loss"
"""Tag of the loss if the module itself logs a value as `train/loss`."""

DETAIL_SECONDS, DETAIL_FRACTION = 0.3, 1e-4
"""Minimum time between two values of the series that are not logged at every logging step, and the fraction of the time
since the start that it is at least: about 20,000 values in two hours, and 60,000 in a week."""


class IntervalMeasurements(LoopCallback):
    """Logs the series of `SERIES` and the learning rates, after one exchange between ranks per logging interval.

    Loss, learning rates and gradient norm are logged at every logging step, the others, the details, at most once per
    `DETAIL_SECONDS`: for a model with steps of 0.1 ms, they would take longer than the steps.

    Args:
        run: Directory of the run, with the number of the attempt.
        throughput: Counts samples and training time.
        monitor: Has the phase of the main thread, and the ranks that are slow.
        checkpointing: Has duration and size of the last checkpoint; None if nothing is saved.
    """

    def __init__(
        self, run: RunDirectory, throughput: Throughput, monitor: Monitor, checkpointing: CheckpointCallback | None
    ) -> None:
        self.run, self.throughput, self.monitor, self.checkpointing = run, throughput, monitor, checkpointing
        self._is_enabled = self._has_warned = False
        self._flop_count: FlopCount | None = None
        self._peak: float | None = None
        self._logged_checkpoint = 0.0, 0
        self._began_at = self._detailed_at = self._ended_at = 0.0
        self._learning_rates: dict[str, float] = {}

    def needs(self, hook: str) -> bool:
        return self._is_enabled

    def on_ready(self, trainer: Trainer) -> None:
        """Begins to measure if rank zero has loggers. All ranks must call."""
        self._is_enabled = bool(strategy_of(trainer).broadcast(bool(trainer.loggers and trainer.log_every_n_steps)))  # type: ignore[attr-defined]
        epoch_loop = fit_loop_of(trainer).epoch_loop
        epoch_loop.record.is_enabled = self._is_enabled
        if not self._is_enabled:
            return
        self._began_at = self._ended_at = monotonic()
        self._exchange = Exchange(strategy_of(trainer), trainer.world_size)
        self._step_time = StepTime(self.monitor.activity, trainer)
        self._measured = self.throughput.samples, 0.0  # the clock starts again with the first epoch
        if can_count(trainer.lightning_module):
            counter = FlopCount(trainer.lightning_module, self.monitor.activity, epoch_loop.record)
            self._flop_count = epoch_loop.around_next_batch = counter
            self._peak = peak_flops_per_second(trainer)

    def on_logging_step(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self._learning_rates = learning_rates(trainer.optimizers)
        self._step_time.measure_step()

    def on_interval_end(self, trainer: Trainer) -> None:
        """Exchanges the values of all ranks and logs them. All ranks must call."""
        record = fit_loop_of(trainer).epoch_loop.record
        has_details = self._exchange.has_details
        now = monotonic()
        if has_details:
            self._detailed_at = now
        next_end = now + (now - self._ended_at)  # if the next interval lasts as long as this one
        self._ended_at = now
        detail_seconds = max(DETAIL_SECONDS, DETAIL_FRACTION * (now - self._began_at))
        values = self._details(trainer) if has_details else {}
        values[LOSS_SUM], values[LOSS_SAMPLES] = record.loss_sum, float(record.samples)
        values[DETAILS_REQUESTED] = float(next_end - self._detailed_at >= detail_seconds)
        has_norm = record.gradient_norm is not None
        if record.gradient_norm is not None:
            values[GRADIENT_NORM] = record.gradient_norm
        record.reset()
        self._exchange.gather(values, has_details)
        if trainer.is_global_zero:
            self._log(trainer, has_details, has_norm)

    def _details(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Returns this rank's values of the series that are not logged at every logging step."""
        return {
            FIRST_GRADIENT: 1e3 * self.monitor.activity.first_gradient or math.nan,
            **self._guarded(self._step_time.take),
            **self._guarded(lambda: memory_in_use(trainer.strategy.root_device)),
            **self._guarded(lambda: {"workload/loader_queue_batches": prepared_batches(trainer)}),
        }

    def _log(self, trainer: Trainer, has_details: bool, has_norm: bool) -> None:
        """Logs the values of all ranks; only rank zero calls this."""
        values = self._exchange.combined()
        del values[DETAILS_REQUESTED]
        values |= self._loss(trainer, values.pop(LOSS_SUM), values.pop(LOSS_SAMPLES))
        if has_details:
            values |= self._speed(trainer) | self._position(trainer) | self._guarded(self._checkpoint)
            if trainer.world_size > 1:
                values |= values_of_ranks(self._exchange.rows(), list(self.monitor.slow_ranks))
            del values[FIRST_GRADIENT]
        learned = (LOSS, OTHER_LOSS, *([GRADIENT_NORM] if has_norm else []))  # shown even if they are not numbers
        known = {tag: value for tag, value in values.items() if tag in learned or not math.isnan(value)}
        known |= self._learning_rates
        for logger in trainer.loggers:
            logger.log_metrics(known, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _loss(self, trainer: Trainer, loss_sum: float, samples: float) -> dict[str, float]:
        """Returns the mean loss under a name that the module does not use; empty if no step returned a loss."""
        metric = fit_loop_of(trainer).epoch_loop.results.get(f"training_step.{LOSS}")
        is_taken = LOSS in trainer._logger_connector._logged_metrics or (metric is not None and metric.meta.logger)
        return {OTHER_LOSS if is_taken else LOSS: loss_sum / samples} if samples else {}

    def _speed(self, trainer: Trainer) -> dict[str, float]:
        samples, seconds = self.throughput.samples, self.throughput.training_seconds
        interval_samples, interval_seconds = samples - self._measured[0], seconds - self._measured[1]
        self._measured = samples, seconds
        if interval_seconds <= 0:
            return {}
        per_second = interval_samples / interval_seconds
        per_device = per_second / trainer.world_size
        speed = {"train/samples_per_second": per_second, "workload/samples_per_second_per_device": per_device}
        flops_per_sample = self._flop_count.per_sample if self._flop_count else None
        if flops_per_sample:
            speed["workload/teraflops_per_second"] = flops_per_sample * per_device / 1e12
            if self._peak:
                speed["workload/mfu_percent"] = 100 * flops_per_sample * per_device / self._peak
        return speed

    def _position(self, trainer: Trainer) -> dict[str, float]:
        batches, loop = trainer.num_training_batches, fit_loop_of(trainer)
        fraction = loop.epoch_loop.batches_done / batches if batches and math.isfinite(batches) else 0.0
        epoch = loop.epochs_done + min(1.0, fraction)
        return {
            "x_axis/epoch": epoch,
            "x_axis/samples": float(self.throughput.samples),
            "x_axis/attempt": float(self.run.attempt),
        }

    def _checkpoint(self) -> dict[str, float]:
        """Returns duration and size of the last checkpoint, once."""
        if self.checkpointing is None:
            return {}
        seconds, size = self.checkpointing.last_seconds, self.checkpointing.last_bytes
        if seconds is None or size is None or (seconds, size) == self._logged_checkpoint:
            return {}
        self._logged_checkpoint = seconds, size
        return {"wall_time/checkpoint_s": seconds, "workload/checkpoint_mib": size / 2**20}

    def _guarded(self, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Returns measured values; none and a single warning if measuring fails, because training has to go on."""
        try:
            return dict(measure())
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"rankzero: some values cannot be measured, and are missing in the charts: {error!r}")
            return {}
