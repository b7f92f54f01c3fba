"""The functions of Lightning and torch that the fast path replaces or skips.

The fast path is used only with the tested release of Lightning, and only while all of these functions are the original
ones: a program, such as a profiler or tracer, may have replaced one at run time. With a release of torch that was not
tested, only `torch_calls.py` is left out.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule
from lightning.pytorch.core import hooks as core_hooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops import utilities
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from lightning.pytorch.utilities import combined_loader
from torch.autograd import graph
from torch.optim import Optimizer

IS_LIGHTNING_TESTED = lightning_version == "2.6.6"
IS_TORCH_TESTED = (2, 10) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 15)

Table = Mapping[Any, str]
"""Class or module -> the names of its functions, separated by spaces."""

LOOP: Table = {
    _TrainingEpochLoop: "run on_run_start advance on_advance_end _should_accumulate _accumulated_batches_reached "
    "_num_ready_batches_reached update_lr_schedulers _update_learning_rates _should_check_val_epoch "
    "_should_check_val_fx _save_loggers_on_train_batch_end",
    call: "_call_callback_hooks _call_lightning_module_hook _call_strategy_hook",
    _LoggerConnector: "on_batch_start on_batch_end update_train_step_metrics should_update_logs log_metrics metrics",
    _ResultCollection: "metrics valid_items _get_cache",
    LightningModule: "lr_scheduler_step",
    _PrefetchDataFetcher: "__next__",
    _DataFetcher: "__next__",
    combined_loader.CombinedLoader: "__next__",
    combined_loader._MaxSizeCycle: "__next__",
    PassThroughProfiler: "start stop",
    Profiler: "profile",
}
"""Functions replaced by `fast/epoch.py`. If one differs, Lightning's own loop trains."""

LOGGING: Table = {
    LightningModule: "log",
    _ResultCollection: "log update_metrics _extract_batch_size",
    _ResultMetric: "update forward",
}
"""Functions replaced by `fast/log.py`. If one differs, `LightningModule.log` is always called."""

TRANSFER: Table = {
    Precision: "convert_input",
    Strategy: "batch_to_device",
    LightningModule: "_on_before_batch_transfer _apply_batch_transfer_handler _call_batch_hook "
    "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
    core_hooks: "move_data_to_device",
}
"""Functions skipped for tensors that are already on the right device. If one differs, all are called."""

OPTIMIZATION: Table = {
    _TrainingEpochLoop: "_build_kwargs",
    _AutomaticOptimization: "run _make_closure _make_step_fn _make_zero_grad_fn _make_backward_fn _optimizer_step "
    "_on_before_zero_grad _optimizer_zero_grad _training_step",
    AbstractClosure: "consume_result",
    Closure: "closure __call__",
    ClosureResult: "from_training_step_output asdict",
    LightningModule: "optimizer_step optimizer_zero_grad backward configure_gradient_clipping",
    LightningOptimizer: "step",
    Strategy: "training_step backward optimizer_step pre_backward post_backward post_training_step",
    DDPStrategy: "pre_backward",
    Precision: "pre_backward backward post_backward optimizer_step _wrap_closure _after_closure _clip_gradients "
    "train_step_context forward_context",
    MixedPrecision: "pre_backward optimizer_step clip_gradients forward_context",
    utilities: "_block_parallel_sync_behavior",
}
"""Functions replaced by `training/step.py`. If one differs, the fast loop uses Lightning's own optimization."""

BACKWARD: Table = {torch.Tensor: "backward", torch.autograd: "backward", graph: "_engine_run_backward"}
STEP: Table = {Optimizer: "profile_hook_step"}
"""`BACKWARD` and `STEP` are replaced by `fast/torch_calls.py`, unless a function in them differs."""


class Functions:
    """Group of functions, as they were when this module was imported.

    Args:
        tables: The functions by class or module. A name that the installed version lacks counts as changed.
    """

    def __init__(self, *tables: Table) -> None:
        self._names = [(owner, name) for table in tables for owner, names in table.items() for name in names.split()]
        self._originals = [getattr(owner, name, None) for owner, name in self._names]
        self.are_same = _comparison(self._names, self._originals)
        """Returns whether no function has been replaced since the import; raises AttributeError if one was deleted."""

    @property
    def are_original(self) -> bool:
        """Whether no function has been replaced or deleted since the import."""
        try:
            return self.are_same()
        except AttributeError:
            return False

    @property
    def replaced_names(self) -> list[str]:
        """The names of the functions that have been replaced or deleted since the import."""
        if self.are_original:
            return []
        return [
            f"{_dotted_name(owner)}.{name}"
            for (owner, name), original in zip(self._names, self._originals, strict=True)
            if getattr(owner, name, None) != original
        ]


def _comparison(names: list[tuple[Any, str]], originals: list[Any]) -> Callable[[], bool]:
    """Returns a function that checks whether all attributes still equal the originals.

    The check runs in every step. A generated expression that names the attributes takes a third of the time of a loop
    over them.
    """
    namespace = {f"owner_{number}": owner for number, (owner, _) in enumerate(names)}
    namespace |= {f"original_{number}": original for number, original in enumerate(originals)}
    comparisons = (f"owner_{number}.{name} == original_{number}" for number, (_, name) in enumerate(names))
    return eval(f"lambda: {' and '.join(comparisons)}", namespace)  # type: ignore[no-any-return]


def _dotted_name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


loop = Functions(LOOP)
logging = Functions(LOGGING)
transfer = Functions(TRANSFER)
optimization = Functions(OPTIMIZATION)
backward = Functions(BACKWARD)
step = Functions(STEP)
