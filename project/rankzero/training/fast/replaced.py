"""The functions of Lightning and torch that the fast path replaces or skips.

The fast path is used only while all of these functions are the ones with which it was compared. A function can differ
in two ways. A release may have changed it: the digest of its source is then not in `known_sources.py`. Or a program,
such as a profiler or tracer, may have replaced it at run time: the attribute is then another object. A release that
changes none of these functions keeps the fast path, whatever its version number.

`python -m rankzero.training.fast.replaced` prints `known_sources.py` for the installed libraries.
"""

import contextlib
import hashlib
import linecache
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from lightning.fabric.plugins import precision as fabric_precision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core import hooks as core_hooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops import _EvaluationLoop, fit_loop, utilities
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.loops.progress import _BatchProgress, _OptimizerProgress, _Progress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities import combined_loader
from torch.autograd import graph
from torch.optim import Optimizer

from rankzero.distributed.process.lightning_names import standard_names
from rankzero.training.fast.known_sources import KNOWN_SOURCES

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

RELIED_ON: Table = {
    fit_loop._FitLoop: "run advance on_run_start on_advance_start on_advance_end reset",
    _TrainingEpochLoop: "reset done _is_training_done",
    _EvaluationLoop: "run",
    _BatchProgress: "reset_on_run increment_ready",
    _OptimizerProgress: "reset_on_run",
    _Progress: "increment_ready increment_started increment_processed increment_completed",
    _LoggerConnector: "on_epoch_end epoch_end_reached update_train_epoch_metrics should_reset_tensors callback_metrics",
    _Metadata: "forked",
    _Sync: "_generate_sync_fn",
    _ResultMetric: "compute reset",
    DDPStrategy: "reduce",
    ParallelStrategy: "reduce_boolean_decision",
    SingleDeviceStrategy: "reduce",
    Trainer: "callback_metrics global_step",
    fabric_precision.Precision: "convert_input backward optimizer_step",
}
"""Functions that are not replaced but relied on: a release that changes one may be incompatible."""

BACKWARD: Table = {torch.Tensor: "backward", torch.autograd: "backward", graph: "_engine_run_backward"}
ZERO_GRAD: Table = {Optimizer: "zero_grad"}
STEP: Table = {Optimizer: "profile_hook_step"}
"""`BACKWARD`, `ZERO_GRAD` and `STEP` are replaced by `fast/torch_calls.py`, unless a function in them differs."""


WRAPPERS = ("torch.utils._contextlib", "torch._dynamo.eval_frame")
"""Modules that define `torch.no_grad` and `torch.compiler.disable`."""


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

    @cached_property
    def changed(self) -> list[str]:
        """The names of functions whose source has no known digest."""
        return [
            f"{owner}.{name}"
            for (owner, name), digest in self.digests.items()
            if digest not in KNOWN_SOURCES.get(owner, {}).get(name, ())
        ]

    @property
    def digests(self) -> dict[tuple[str, str], str]:
        """Class or module, and function name -> digest of the function's source at the time of the import."""
        return {
            (_dotted_name(owner), name): source_digest(original)
            for (owner, name), original in zip(self._names, self._originals, strict=True)
        }


def _comparison(names: list[tuple[Any, str]], originals: list[Any]) -> Callable[[], bool]:
    """Returns a function that checks whether all attributes still equal the originals.

    The check runs in every step. A generated expression that names the attributes takes a third of the time of a loop
    over them.
    """
    namespace = {f"owner_{number}": owner for number, (owner, _) in enumerate(names)}
    namespace |= {f"original_{number}": original for number, original in enumerate(originals)}
    comparisons = (f"owner_{number}.{name} == original_{number}" for number, (_, name) in enumerate(names))
    return eval(f"lambda: {' and '.join(comparisons)}", namespace)  # type: ignore[no-any-return]


def source_digest(function: Any) -> str:
    """Returns the digest of the source of a function and of the functions it wraps; `missing` without source."""
    sources = "".join(map(_source, _code_objects(function)))
    return hashlib.sha256(standard_names(sources).encode()).hexdigest()[:16] if sources else "missing"


def _source(code: CodeType) -> str:
    """Returns the source lines of a function: its decorators, its signature and its body.

    `inspect.getsource` finds the same lines by tokenizing, which would take a quarter of a second for all functions.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    deeper_indent, has_head = " " * (indent + 1), False
    for number, line in enumerate(lines):
        if line.startswith(deeper_indent) or not line.strip():
            continue
        if has_head and line[indent] != ")":  # ")" at this indent may close the signature
            return "".join(lines[:number]).rstrip()
        has_head = has_head or line.lstrip().startswith(("def ", "async def ", "class "))
    return "".join(lines).rstrip()


def _code_objects(function: Any) -> Iterator[CodeType]:
    """Yields the code objects of a function and of the functions that it wraps.

    Wrappers from Python's standard library are skipped, and so are `torch.no_grad` and `torch.compiler.disable`, whose
    sources differ in each release of torch.
    """
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    library = Path(contextlib.__file__).parent
    while function is not None:
        code = getattr(function, "__code__", None)
        is_wrapper = code is not None and function.__globals__.get("__name__") in WRAPPERS
        if code is not None and not is_wrapper and Path(code.co_filename).parent != library:
            yield code
        function = getattr(function, "__wrapped__", None)


def _dotted_name(owner: Any) -> str:
    name = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)
    return standard_names(name)


loop = Functions(LOOP)
logging = Functions(LOGGING)
transfer = Functions(TRANSFER)
optimization = Functions(OPTIMIZATION)
relied_on = Functions(RELIED_ON)
backward = Functions(BACKWARD)
zero_grad = Functions(ZERO_GRAD)
step = Functions(STEP)

LIGHTNING_FUNCTIONS = (loop, logging, transfer, optimization, relied_on)
TORCH_FUNCTIONS = (backward, zero_grad, step)


def changed_in_lightning() -> list[str]:
    """Returns the names of Lightning's functions whose source has no known digest."""
    return [name for functions in LIGHTNING_FUNCTIONS for name in functions.changed]


def _print_known_sources(write: Callable[[str], Any] = print) -> None:
    """Prints the known digests and those of the installed libraries, as Python source."""
    known = {owner: {name: list(digests) for name, digests in names.items()} for owner, names in KNOWN_SOURCES.items()}
    for functions in (*LIGHTNING_FUNCTIONS, *TORCH_FUNCTIONS):
        for (owner, name), digest in functions.digests.items():
            digests = known.setdefault(owner, {}).setdefault(name, [])
            if digest not in digests:
                digests.append(digest)
    write(f'"""{KNOWN_SOURCES_TITLE}"""\n')
    write("KNOWN_SOURCES: dict[str, dict[str, tuple[str, ...]]] = {")
    for owner in sorted(known):
        write(f'    "{owner}": {{')
        for name in sorted(known[owner]):
            digests_text = ", ".join(f'"{digest}"' for digest in known[owner][name])
            write(f'        "{name}": ({digests_text},),')
        write("    },")
    write("}")


KNOWN_SOURCES_TITLE = "Digests of the sources that the fast path was compared with; printed by `replaced.py`."

if __name__ == "__main__":
    _print_known_sources()
