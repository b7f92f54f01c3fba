"""Logs the loss, the speed and the resources of training at the logging interval."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.runs.directory import RunDirectory
from rankzero.sampling.loader import ManagedLoader
from rankzero.show.measurements import exchange as exchanges
from rankzero.show.measurements.exchange import BROKEN_AT, DETAILS_REQUESTED, LOSS_SAMPLES, LOSS_SUM, Exchange
from rankzero.show.measurements.step_time import StepTime
from rankzero.show.measurements.throughput import FlopCount, Throughput, can_count, peak_flops_per_second
from rankzero.show.report.curves import EPOCH, FIRST_GRADIENT, GRADIENT_NORM, MFU, PREFIX, SAMPLES, SERIES
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import shown_metrics
from rankzero.training.metrics.epoch_averages import logger_connector_of
from rankzero.training.strategies import strategy_of

LOSS = "train/loss"
OTHER_LOSS = "train/mean_loss"
"""Tag of the loss if the module itself logs a value as `train/loss`."""

DETAIL_SECONDS, DETAIL_FRACTION = 0.3, 1e-4
"""Minimum time between two values of the series that are not logged at every logging step, and the fraction of the time
since the start that it is at least: about 20,000 values in two hours, and 60,000 in a week."""


class _Interval(NamedTuple):
    """An interval whose values are being exchanged between ranks."""

    step: int
    loss_tag: str
    has_gradient_norm: bool
    has_details: bool
    own_values: dict[str, float]
    tags_of_module: frozenset[str]


class IntervalMeasurements(LoopCallback):
    """Logs the series of `SERIES` and the learning rates, after one exchange between ranks per logging interval.

    On several ranks or a GPU, training continues during the exchange, and the values are logged later: at the latest at
    the next logging step, or before a checkpoint is saved. Their step is the one at which the interval ended.

    Loss, learning rates and gradient norm are logged at every logging step; all other series, the details, at most once
    per `DETAIL_SECONDS`. For a model with steps of 0.1 ms, they would take longer than the steps.
    """

    def __init__(
        self,
        run: RunDirectory,
        throughput: Throughput,
        monitor: Monitor,
        checkpointing: CheckpointCallback | None,
        logger: DurableTensorBoardLogger | None,
        log_system: bool,
        weights: FiniteWeights,
    ) -> None:
        self.run, self.throughput, self.monitor, self.checkpointing = run, throughput, monitor, checkpointing
        self.logger, self.log_system, self.weights = logger, log_system, weights
        self._is_enabled = self._is_deferred = self._is_rank_zero = self._has_warned = False
        self._flop_count: FlopCount | None = None
        self._peak: float | None = None
        self._logged_checkpoint = 0.0, 0
        self._began_at = self._detailed_at = self._ended_at = 0.0
        self._learning_rates: dict[str, float] = {}
        self._exchange: Exchange | None = None
        self._interval: _Interval | None = None

    def needs(self, hook: str) -> bool:
        return self._is_enabled and (hook != "on_tick" or self._is_deferred)

    def on_ready(self, trainer: Trainer) -> None:
        """Begins to measure if rank zero logs. All ranks must call."""
        interval = strategy_of(trainer).broadcast(trainer.log_every_n_steps if self.logger else 0)  # type: ignore[attr-defined]
        epoch_loop = fit_loop_of(trainer).epoch_loop
        epoch_loop.record.interval = int(interval)
        self._is_enabled = epoch_loop.record.is_enabled = bool(interval)
        if not self._is_enabled:
            return
        if self.logger:
            self.logger.position = partial(self._epoch_and_samples, trainer)
        self._began_at = self._ended_at = monotonic()
        self._is_rank_zero = trainer.is_global_zero
        logger_connector_of(trainer).holds_rows = self.log_system and self._is_rank_zero
        self._is_deferred = trainer.world_size > 1 or trainer.strategy.root_device.type != "cpu"
        self._exchange, self._interval = Exchange(strategy_of(trainer), trainer.world_size), None
        self._step_time = StepTime(self.monitor.activity, trainer)
        self._measured = self.throughput.samples, 0.0  # the clock starts again with the first epoch
        if can_count(trainer.lightning_module):
            counter = FlopCount(trainer.lightning_module, self.monitor.activity, epoch_loop.record)
            self._flop_count = epoch_loop.around_next_batch = counter
            self._peak = peak_flops_per_second(trainer)
            if self._peak and self.logger:
                peak = f"{SERIES[MFU].description}: {self._peak / 1e12:g} TFLOP/s with precision {trainer.precision}"
                self.logger.descriptions[MFU] = peak

    def on_logging_step(self, trainer: Trainer) -> None:
        self._finish_exchange(trainer)
        if self._is_rank_zero:
            self._learning_rates = self._guarded(lambda: learning_rates(trainer.optimizers))
            assert self.logger is not None
            self.logger.awaited_step = fit_loop_of(trainer).epoch_loop.steps_done
        self._step_time.measure_step()

    def on_interval_end(self, trainer: Trainer) -> None:
        """Begins the exchange of the values of all ranks. All ranks must call."""
        self._finish_exchange(trainer)
        exchange, epoch_loop = self._exchange, fit_loop_of(trainer).epoch_loop
        assert exchange is not None
        record, has_details = epoch_loop.record, exchange.has_details
        now = monotonic()
        if has_details:
            self._detailed_at = now
        next_end = now + (now - self._ended_at)  # if the next interval lasts as long as this one
        self._ended_at = now
        detail_seconds = max(DETAIL_SECONDS, DETAIL_FRACTION * (now - self._began_at))
        values = self._details(trainer) if has_details else {}
        values[LOSS_SUM], values[LOSS_SAMPLES] = record.loss_sum, float(record.samples)
        values[BROKEN_AT] = record.broken_at
        values[DETAILS_REQUESTED] = float(next_end - self._detailed_at >= detail_seconds)
        if record.gradient_norm is not None:
            values[GRADIENT_NORM] = record.gradient_norm
        record.reset()
        exchange.begin(values)
        if self._is_rank_zero:
            assert self.logger is not None
            step, own_values = epoch_loop.steps_done, self._learning_rates
            epoch, samples = self.logger.mark_interval(step)
            if has_details:
                own_values = own_values | self._speed(trainer) | self._guarded(self._checkpoint)
                own_values |= {EPOCH: epoch, SAMPLES: float(samples), "x_axis/attempt": float(self.run.attempt)}
            tags_of_module = frozenset(shown_metrics(trainer)["log"])
            metric = epoch_loop.results.get(f"training_step.{LOSS}")
            is_taken = LOSS in tags_of_module or (metric is not None and metric.meta.logger)
            loss_tag, has_norm = OTHER_LOSS if is_taken else LOSS, GRADIENT_NORM in values
            self._interval = _Interval(step, loss_tag, has_norm, has_details, own_values, tags_of_module)
        if exchange.is_complete or (self.log_system and self._is_rank_zero):
            self._finish_exchange(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._exchange is not None and self._exchange.is_complete:  # otherwise, a rank may be lost
            with suppress(Exception):  # the exception that ends training is the one to report
                self._finish(trainer)

    def _finish_exchange(self, trainer: Trainer) -> None:
        """Logs the values of the last interval, after those of all ranks have arrived."""
        if self._exchange is None or not self._exchange.is_begun:
            return
        rows = self._exchange.finish()
        interval, self._interval = self._interval, None
        if interval is None:  # not rank zero
            return
        values = exchanges.combine(rows)
        del values[DETAILS_REQUESTED], values[BROKEN_AT]
        loss_sum, samples = values.pop(LOSS_SUM), values.pop(LOSS_SAMPLES)
        self.weights.check_interval(trainer, interval.step + 1, loss_sum, samples, exchanges.first_broken(rows))
        if interval.has_details:
            if len(rows) > 1:
                values |= exchanges.values_of_ranks(rows, list(self.monitor.slow_ranks))
            del values[FIRST_GRADIENT]
        known = {tag: value for tag, value in values.items() if value == value} | interval.own_values  # without NaN
        # Loss and norm are shown even if they are not numbers.
        if samples:
            known[interval.loss_tag] = loss_sum / samples
        if interval.has_gradient_norm:
            known[GRADIENT_NORM] = values[GRADIENT_NORM]
        assert self.logger is not None
        own = {tag: value for tag, value in known.items() if tag not in interval.tags_of_module}
        self.logger.awaited_step = None
        self.logger.log_metrics(own, interval.step)
        if self.log_system:
            prefixed = {f"{PREFIX}{tag}": value for tag, value in known.items()}
            logger_connector_of(trainer).complete_row(prefixed, interval.step)

    def on_tick(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        if self._exchange is not None and self._exchange.is_complete:  # a tick does not wait
            self._finish(trainer)

    def _finish(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Logs all values that have not arrived yet."""
        logger_connector_of(trainer).deliver_row()
        self._finish_exchange(trainer)

    on_validation_start = on_train_epoch_end = on_train_end = _finish
    on_save_checkpoint = _finish  # an attempt that resumes from the checkpoint does not log the interval again

    def _details(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Returns this rank's values of the series that are not logged at every logging step."""
        return {
            FIRST_GRADIENT: 1e3 * self.monitor.activity.first_gradient or math.nan,
            **self._guarded(self._step_time.take),
            **self._guarded(lambda: memory_in_use(trainer.strategy.root_device)),
            **self._guarded(lambda: {"workload/loader_queue_batches": prepared_batches(trainer)}),
        }

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
                speed[MFU] = 100 * flops_per_sample * per_device / self._peak
        return speed

    def _epoch_and_samples(self, trainer: Trainer) -> tuple[float, int]:
        batches, loop = trainer.num_training_batches, fit_loop_of(trainer)
        done, samples = loop.epoch_loop.batches_done, self.throughput.samples
        if not done or not batches or not math.isfinite(batches):
            return loop.epochs_done, samples
        # An epoch counts as done from its last hooks on, and if `max_steps` has cut it short.
        epochs_before = loop.epochs_done - (not loop.is_within_epoch)
        return epochs_before + min(1.0, done / batches), samples

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
        """Returns measured values; none and a single warning if measuring fails; training continues."""
        try:
            return dict(measure())
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                text = "some values cannot be measured, and are missing in the charts; training continues"
                rank_zero_warn(f"rankzero: {text}: {error!r}")
            return {}


def learning_rates(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Returns `train/lr`, and `train/lr-1`, ... for further parameter groups and optimizers.

    Unlike Lightning's LearningRateMonitor, this needs no schedule, and does not add the rates to the run's metrics.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups if group.get("lr") is not None]  # an optimizer may choose its own rate
    return {f"train/lr-{number}" if number else "train/lr": float(rate) for number, rate in enumerate(rates)}


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Returns the memory of this process in GiB, by tag: on the device, the largest amount since the start."""
    on_device = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan
    on_host = psutil.Process().memory_info().rss / 2**30
    return {"workload/device_memory_gib": on_device, "workload/host_memory_gib": on_host}


def prepared_batches(trainer: Trainer) -> float:
    """Returns the number of batches that this rank's loader processes hold ready; NaN without loader processes."""
    combined = trainer.fit_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    counts = [loader.prepared_batches for loader in loaders if isinstance(loader, ManagedLoader)]
    known = [count for count in counts if count is not None]
    return float(sum(known)) if known else math.nan
