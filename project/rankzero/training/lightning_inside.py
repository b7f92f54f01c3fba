"""The private names of Lightning (2.6.6) and torchmetrics (1.9) that Rankzero uses, and when its loop may train."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import lightning_hasattr
from torch import Tensor
from torchmetrics import Metric

from rankzero.distributed.torch_inside import missing, names_for
from rankzero.messages import RequestError

TESTED_VERSIONS = ("2.6.6",)
"""Releases of Lightning with which the training loop is tested; with others, Lightning's own loop trains."""

TRAINING, VARIABLES = "training", "the variables PL_TRAINER_*"
"""Features that private names are needed for."""

with names_for(TRAINING):
    from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
    from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as EpochLoop
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
    from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector as LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
    from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

with names_for(VARIABLES):
    from lightning.pytorch.utilities.argparse import _defaults_from_env_vars


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns a class in place of a missing one, so that the modules that extend it can be imported."""
        if TRAINING not in missing or name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return type(name, (), {})


def check_release() -> None:
    """Raises a RequestError if this release of Lightning lacks one of the classes that Rankzero extends."""
    if TRAINING in missing:
        found = f"{missing[TRAINING]}; Rankzero is tested with lightning {', '.join(TESTED_VERSIONS)}"
        raise RequestError(f"lightning {lightning.__version__}", found, 'pip install "lightning>=2.6.6,<2.7"')


def defaults_from_variables(function: Any) -> Any:
    """Decorates a Trainer's `__init__` to read the variables `PL_TRAINER_*`, as Lightning's Trainer does."""
    return function if VARIABLES in missing else _defaults_from_env_vars(function)


# fmt: off
__all__ = [
    "CheckpointConnector", "Closure", "ClosureResult", "EpochLoop", "FitLoop", "IndexBatchSampler", "LoggerConnector",
    "Metadata", "Precision", "PredictionLoop", "ResultCollection", "ResultMetric", "Sync", "TunerExit",
]
# fmt: on

FIRST_BATCH = "_first_loop_iter"
"""Attribute of the logger connector: whether the batch is the first one of the epoch; None before it."""

BATCH_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
"""The hooks of a training batch that both `Callback` and `LightningModule` define."""

OPTIMIZER_HOOKS = ("optimizer_step", "optimizer_zero_grad", "backward")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STRATEGY_METHODS = (
    *("training_step", "backward", "optimizer_step", "pre_backward", "post_backward", "post_training_step"),
    "batch_to_device",
)
PRECISION_METHODS = (
    *("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step"),
    *("train_step_context", "forward_context", "_wrap_closure", "_after_closure", "_clip_gradients"),
)
"""Each tuple above lists methods that a step skips unless user code overrides or replaces them."""

_methods_of = attrgetter(
    *(*BATCH_HOOKS, *OPTIMIZER_HOOKS, *TRANSFER_HOOKS),
    *("training_step", "configure_gradient_clipping", "lr_scheduler_step"),
)


def overrides(instance: Any, method_name: str, parent: type) -> bool:
    """Returns whether an object or its class replaces a method of `parent`."""
    method = getattr(instance, method_name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(parent, method_name)


def lightning_optimizers(module: LightningModule) -> list[Any]:
    """Returns Lightning's wrappers of the optimizers."""
    found = module.optimizers()
    return found if isinstance(found, list) else [found]


def public_state(strategy: Any, wrappers: Sequence[Any]) -> tuple[Any, ...]:
    """Returns what changes if user code replaces a method of its module, the strategy, the precision or an optimizer.

    This runs in every step. For instances the number of attributes is enough: it grows when a method is replaced.
    """
    module = strategy.lightning_module
    return (
        module.automatic_optimization,
        _methods_of(type(module)),
        len(module.__dict__),
        len(strategy.__dict__),
        len(strategy.precision_plugin.__dict__),
        len(wrappers[0].__dict__) if wrappers else 0,
        strategy.optimizers,
    )


def fallback_reason(trainer: Trainer, data_fetcher: Any) -> str | None:
    """Returns why Lightning's own loop has to train, or None if `TrainingLoop` can."""
    module = trainer.lightning_module
    if lightning.__version__ not in TESTED_VERSIONS:
        return f"Rankzero's loop is not tested with lightning {lightning.__version__}"
    if not module.automatic_optimization:
        return f"{type(module).__name__} uses manual optimization"
    if passes_iterator(data_fetcher):
        return "training_step takes dataloader_iter"
    if any(trainer.current_epoch == each.swa_end + 1 for each in averaging_in(trainer)):  # an epoch that they add
        return "StochasticWeightAveraging updates batch norm without backward passes"
    if type(trainer.profiler) is not PassThroughProfiler:  # type: ignore[attr-defined]
        return f"{type(trainer.profiler).__name__} measures the parts of Lightning's loop"  # type: ignore[attr-defined]
    return None


def has_stock_optimizer_step(trainer: Trainer) -> bool:
    """Returns whether neither the module nor another object replaces a part of Lightning's optimizer step."""
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    optimizers = lightning_optimizers(module)
    return (
        module.automatic_optimization
        and not any(overrides(module, hook, LightningModule) for hook in OPTIMIZER_HOOKS)
        and (type(precision) is Precision or (type(precision) is MixedPrecision and precision.scaler is None))
        and vars(strategy).keys().isdisjoint(STRATEGY_METHODS)
        and vars(precision).keys().isdisjoint(PRECISION_METHODS)
        and len(optimizers) == 1
        and type(optimizers[0]).step is LightningOptimizer.step
        and "step" not in vars(optimizers[0])
        and optimizers[0]._optimizer is trainer.optimizers[0]
    )


def needs_transfer(trainer: Trainer) -> bool:
    """Returns whether even a batch of tensors on the run's device has to be converted or passed to a hook."""
    owners = (trainer.lightning_module, LightningModule), (trainer.datamodule, LightningDataModule)  # type: ignore[attr-defined]
    return (
        overrides(trainer.precision_plugin, "convert_input", Precision)
        or "batch_to_device" in vars(trainer.strategy)
        or any(overrides(owner, hook, parent) for owner, parent in owners for hook in TRANSFER_HOOKS)
    )


def is_plain(batch: Any, device: torch.device | None) -> bool:
    """Returns whether a batch is a tensor on `device` (None: the CPU), or a tuple or list of such tensors."""
    for element in batch if type(batch) is tuple or type(batch) is list else (batch,):
        if type(element) is not Tensor or not (element.is_cpu if device is None else element.device == device):
            return False
    return True


def direct_fetch(data_fetcher: Any) -> Callable[[], Any]:
    """Returns a function that reads the next batch; it reads a single loader directly, not through a CombinedLoader."""
    combined = data_fetcher.combined_loader
    cycle = combined._iterator
    if not (
        not passes_iterator(data_fetcher)
        and data_fetcher.length is not None
        and not data_fetcher.batches
        and len(combined.flattened) == len(cycle.iterators) == 1
        and combined.iterables is combined.flattened[0]
    ):
        return lambda: next(data_fetcher)[0]
    length = data_fetcher.length

    def fetch() -> Any:
        if data_fetcher.done:
            raise StopIteration
        try:
            # Looked up in each step: a stored reference to the iterator would keep its worker processes alive.
            batch = next(cycle.iterators[0])
        except StopIteration:
            data_fetcher.done = True
            raise
        data_fetcher.fetched += 1
        data_fetcher.done = data_fetcher.fetched >= length
        return batch

    return fetch


def passes_iterator(data_fetcher: Any) -> bool:
    """Returns whether `training_step` takes the iterator of the loader."""
    return not hasattr(data_fetcher, "prefetch_batches")


def evaluated_loader(trainer: Trainer) -> Any:
    """Returns the loader of the current evaluation batch."""
    loops = {TrainerFn.VALIDATING: trainer.validate_loop, TrainerFn.TESTING: trainer.test_loop}
    loop = loops.get(trainer.state.fn, trainer.fit_loop.epoch_loop.val_loop)  # type: ignore[arg-type]
    combined, results = loop._combined_loader, trainer._results
    assert combined is not None and results is not None
    return combined.flattened[results.dataloader_idx or 0]


def transferred(trainer: Trainer, batch: Any) -> Any:
    """Returns a batch that the precision, the hooks of the module and the strategy have converted and moved."""
    batch = trainer.precision_plugin.convert_input(batch)
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    hooks = data if data and overrides(data, "on_before_batch_transfer", LightningDataModule) else module
    batch = hooks.on_before_batch_transfer(batch, 0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def gradient_clipper(precision: Precision) -> Callable[..., None]:
    """Returns the method that calls `configure_gradient_clipping`."""
    return precision._clip_gradients


def logger_connector(trainer: Trainer) -> Any:
    """Returns the part of the Trainer that passes logged values to loggers."""
    return trainer._logger_connector


def replace_logger_connector(trainer: Trainer, connector: Any) -> None:
    """Makes the Trainer pass logged values to another connector."""
    trainer._logger_connector = connector


def shown_metrics(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Returns the metrics that the Trainer shows by kind, as far as they are computed."""
    connector = trainer._logger_connector
    metrics = connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics
    return dict(zip(("callback", "log", "pbar"), metrics, strict=True))


@contextmanager
def prepared_by(trainer: Trainer, prepare: Callable[..., object]) -> Iterator[None]:
    """Makes the Trainer prepare loaders with a function within the block."""
    trainer._data_connector._prepare_dataloader = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer._data_connector._prepare_dataloader


def ddp_arguments(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns the arguments with which a strategy was created."""
    names = [
        *("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "timeout"),
        *("precision_plugin", "checkpoint_io", "start_method", "process_group_backend"),
    ]
    return {name: getattr(strategy, f"_{name}") for name in names} | strategy._ddp_kwargs


def names_set_by(callback: Callback, module: LightningModule) -> list[str]:
    """Returns the names of the module's attributes that a batch size or learning rate finder sets."""
    if isinstance(callback, BatchSizeFinder):
        return [callback._batch_arg_name]
    if isinstance(callback, LearningRateFinder) and callback._update_attr:
        names = (callback._attr_name,) if callback._attr_name else ("lr", "learning_rate")
        return [name for name in names if lightning_hasattr(module, name)][:1]
    return []


def destination(logger: Any) -> str:
    """Returns the folder of a logger's versions, or the server and the project of its runs."""
    folder = logger.root_dir and os.path.abspath(logger.root_dir)  # noqa: PTH100 - also the address of a bucket
    others = (getattr(logger, name, None) for name in ("_tracking_uri", "_experiment_name", "_project"))
    return " ".join(str(part) for part in (folder, *others) if part)


def continue_version(logger: Any, version: Any) -> None:
    """Gives a logger its version, or its run on a server, unless the user or the logger has chosen one."""
    if isinstance(logger, WandbLogger):
        if logger.version is None:
            vars(logger).update(_id=version, _wandb_init=vars(logger)["_wandb_init"] | {"id": version})
    elif isinstance(logger, MLFlowLogger):
        vars(logger).update(_run_id=version)
    elif logger._version is None:
        logger._version = version


def mlflow_run(logger: Any, run_id: str) -> Any:
    """Returns a run of MLflow; None if the logger has a run of its own. Raises MLflow's errors."""
    from mlflow.tracking import MlflowClient

    return None if vars(logger)["_run_id"] else MlflowClient(vars(logger)["_tracking_uri"]).get_run(run_id)


def averaging_in(trainer: Trainer) -> list[StochasticWeightAveraging]:
    """Returns the callbacks that average weights."""
    return [each for each in trainer.callbacks if isinstance(each, StochasticWeightAveraging)]  # type: ignore[attr-defined]


def batches_per_step_of(trainer: Trainer) -> int:
    """Returns the batches per step, not the value that StochasticWeightAveraging sets for an epoch without steps."""
    replaced = (getattr(callback, "_accumulate_grad_batches", None) for callback in averaging_in(trainer))
    return next((batches for batches in replaced if batches is not None), int(trainer.accumulate_grad_batches))


def set_update_count(metric: Metric, count: int) -> None:
    """Sets how often a metric was updated, by which torchmetrics weights some states."""
    metric._update_count = count


def replace_load_state(saving_module: Any, convert: Callable[[Any, Any], Any]) -> None:
    """Makes `load_from_checkpoint` pass each state dict through `convert(module, state)`."""
    stock_load_state = getattr(saving_module, "_load_state", None)
    if stock_load_state is None or hasattr(stock_load_state, "converts"):
        return

    def load_state(cls: Any, checkpoint: Any, *arguments: Any, **options: Any) -> Any:
        load_state_dict = cls.load_state_dict

        def load_converted(self: Any, state: Any, *arguments: Any, **options: Any) -> Any:
            state = convert(self, state) if hasattr(self, "named_modules") else state
            return load_state_dict(self, state, *arguments, **options)

        is_own = "load_state_dict" in vars(cls)
        cls.load_state_dict = load_converted
        try:
            return stock_load_state(cls, checkpoint, *arguments, **options)
        finally:
            del cls.load_state_dict
            if is_own:
                cls.load_state_dict = load_state_dict

    load_state.converts = True  # type: ignore[attr-defined]
    saving_module._load_state = load_state


def add_configure_optimizers(cli: Any) -> None:
    """Adds the optimizer of a LightningCLI's command line to its model."""
    cli._add_configure_optimizers_method_to_model(None)
