"""`--compile step`: decides which training steps run as a compiled graph, and runs the others as usual."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor
from torch.optim import Optimizer

from rankzero.distributed.torch_inside import (
    CannotCompileError,
    backward,
    compiler_problem,
    set_step_called,
    step_hooks,
    stepper,
    tracing_problem,
)
from rankzero.messages import print_notice
from rankzero.training.lightning_inside import has_stock_optimizer_step
from rankzero.training.speed.step_graph import UPDATED, StepGraph, settings_of, sizes_in
from rankzero.training.strategies import strategy_of

MAX_GRAPHS = 4
"""Graphs per fit; a new one is needed if a callback unfreezes parameters, for example."""


class CompiledStep:
    """Runs training steps as a compiled graph, and the first step and those that cannot be compiled as usual.

    With several ranks, either all ranks bypass DistributedDataParallel in a step or none does.

    Attributes:
        graph: The current graph; None before the second step.
        reason: Why no step is compiled; None if steps are compiled.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.graph: StepGraph | None = None
        self.reason: str | None = None
        self._graphs = 0
        self._is_checked = self._is_local = self._has_failed = self._updates = self._has_updated = False
        self._settings: list[dict[str, Any]] = []
        """The optimizer's settings in the last step without graph."""
        self._settings_vary = False
        """Whether a schedule changes settings other than the learning rate; the graph then updates no parameters."""
        self._is_first = True
        self._graph_sizes: list[torch.Size] = []
        """The sizes of the first batch of the graph."""
        self._sizes: list[torch.Size] | None = None
        """The sizes of the batches whose steps run as a graph; None for any."""
        self._gradients: Sequence[Tensor | None] | None = None

    def check(self, reason: str | None) -> None:
        """Compiles no step on any rank if one has a `reason`. Only the first call counts. All ranks must call."""
        if not self._is_checked:
            self._is_checked = True
            self._agree(reason or problem_of(self._trainer))

    def prepare(self, eager: Any, optimizer: Optimizer, is_observed: bool) -> None:
        """Adapts to the hooks and methods that user code has set.

        `eager.training_step` runs a step that is not compiled. With `is_observed`, user code may read or change
        gradients before the optimizer's step.
        """
        trainer, self._eager, self._optimizer = self._trainer, eager, optimizer
        self._module, self._strategy = trainer.lightning_module, strategy_of(trainer)
        self._context = trainer.precision_plugin.train_step_context
        self._eager_step, self._step_hooks = stepper(optimizer), step_hooks(optimizer)
        self._updates = False
        self._may_update = (
            not self._settings_vary
            and type(optimizer) in UPDATED
            and not is_observed
            and trainer.world_size == trainer.accumulate_grad_batches == 1
            and self._strategy.root_device.type == "cpu"
        )

    def take_step(self, closure: Callable[[], Any]) -> None:
        """Does what `optimizer.step(closure=closure)` does, unless the graph has updated the parameters."""
        if self.graph is None and not self.reason:
            settings, self._settings = self._settings, self._read_settings()
            self._settings_vary |= not self._is_first and settings != self._settings
            self._may_update &= not self._settings_vary
        is_observed = any(self._step_hooks) or self._trainer.gradient_clip_val or self._strategy.is_weighted
        self._updates = self._may_update and not is_observed
        if self._updates:
            loss = closure()
            if self._has_updated:
                set_step_called(self._optimizer)
            else:
                self._eager_step(lambda: loss)
        else:
            self._eager_step(closure)
        if self._is_first:  # `training_step` may have returned None
            self._is_first = all(parameter.grad is None for parameter in self._module.parameters())

    def _read_settings(self) -> list[dict[str, Any]]:
        return [settings_of(group) for group in self._optimizer.param_groups]

    def training_step(self, *batch: Any) -> Any:
        """Runs a training step, as a graph if possible; returns its output."""
        self._gradients, self._has_updated = None, False
        if self.graph and not self.graph.is_current():
            self._settings_vary |= self.graph.settings_vary
            self._settings = self._read_settings()
            self.graph, self._is_first = None, True  # an eager step creates the optimizer's new state
        self._is_local = not (self.reason or self._is_first or self._strategy.share.has_empty_rank)
        if not self._is_local:
            return self._eager.training_step(*batch)
        return self._strategy.run_locally(self._run, *batch)

    def backward(self, loss: Tensor) -> None:
        """Does what `loss.backward()` does, or sets the gradients that the graph has computed."""
        micro_batches = self._trainer.accumulate_grad_batches
        if self._gradients is None or self.graph is None:
            backward(loss)
        else:
            strategy = self._strategy
            scale = (strategy.scale if strategy.is_weighted else strategy.share.loss_weight) / micro_batches
            is_scaled = isinstance(scale, Tensor) or scale != 1
            for parameter, gradient in zip(self.graph.parameters, self._gradients, strict=True):
                if gradient is not None:
                    gradient = gradient * scale if is_scaled else gradient
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._gradients = None
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        if self._is_local and self.graph and not (micro_batches > 1 and epoch_loop.should_accumulate()):
            self._strategy.average_gradients(self.graph.parameters)

    def _run(self, *batch: Any) -> Any:
        """Runs a step without DistributedDataParallel."""
        graph, result, problem = self.graph, None, None
        is_new = graph is None or graph.updates != self._updates
        if graph is None or is_new:
            graph = self.graph = StepGraph(self._module, self._optimizer, self._context, self._updates)
            self._graph_sizes = sizes_in(batch[0])
            self._graphs += 1
        compilations = graph.function.compilations
        if not self._has_failed and (self._sizes is None or self._sizes == sizes_in(batch[0])):
            try:
                result = self._run_graph(graph, batch)
            except CannotCompileError as error:
                problem = self._failed(graph, batch, str(error))
        if is_new:
            self._agree(problem)
        elif problem:
            self._refuse(problem)
        if result is None:
            with self._context():
                return self._module.training_step(*batch)
        output, self._gradients, calls = result
        self._has_updated = graph.updates
        output, results = graph.replay_calls(calls, output)
        if graph.function.compilations > compilations and (name := graph.replace_stored(results)):
            self._has_failed = True
            self._refuse(f"training_step stores the result of a metric as {name}")
        return output

    def _failed(self, graph: StepGraph, batch: tuple[Any, ...], problem: str) -> str | None:
        """Runs further steps without graph; returns None if those with the first batch's sizes still run as one."""
        if self._sizes is None and graph.function.compilations and self._graph_sizes != sizes_in(batch[0]):
            self._sizes = self._graph_sizes
            text = f"not compiling steps with other sizes of batches (--compile step): {problem}"
            self._print(text, from_any_rank=True)
            return None
        self._has_failed = True
        return problem

    def _run_graph(self, graph: StepGraph, batch: tuple[Any, ...]) -> tuple[Any, Sequence[Tensor | None], list[Any]]:
        """Runs the graph, and prints how long a compilation takes."""
        compilations, start = graph.function.compilations, monotonic()
        if not compilations:
            if graph.problem:
                raise CannotCompileError(graph.problem)
            if self._graphs > MAX_GRAPHS:
                changed = "trained parameters or settings of the optimizer"
                raise CannotCompileError(f"{changed} have changed {MAX_GRAPHS} times")
            self._print("compiling the training step (--compile step) ...")
        result = graph.run(*batch)
        if graph.function.compilations > compilations:
            again = " again, for other sizes of batches," * bool(compilations)
            self._print(f"compiled the training step{again} in {monotonic() - start:.1f} s")
        return result

    def _agree(self, problem: str | None) -> None:
        """Compiles no step on any rank if one rank has a problem. All ranks must call."""
        problems = strategy_of(self._trainer).gather(problem)
        self.reason = next(filter(None, problems), None)
        if self.reason:
            rank = problems.index(self.reason)
            text = f"not compiling training steps (--compile step): {self.reason}"
            self._print(text + f" (rank {rank})" * (rank > 0))

    def _refuse(self, problem: str) -> None:
        """Runs further steps of this rank without graph."""
        self._print(f"not compiling further training steps (--compile step): {problem}", from_any_rank=True)
        if self._trainer.world_size == 1:
            self.reason = problem

    def _print(self, text: str, from_any_rank: bool = False) -> None:
        rank = self._trainer.global_rank
        if rank == 0 or from_any_rank:
            print_notice(text + f" (rank {rank})" * (rank > 0))


@contextmanager
def compiled_model(trainer: Trainer, model: LightningModule) -> Iterator[Any]:
    """Compiles a module's steps as Lightning does for `torch.compile(module)`; its backward pass is not traced."""
    problem = compiler_problem(strategy_of(trainer).root_device)
    if problem or getattr(model, "_compiler_ctx", None) is not None:
        if problem and trainer.is_global_zero:
            print_notice(f"not compiling the model (--compile model): {problem}")
        yield model
        return
    try:
        yield torch.compile(model)
    finally:
        to_uncompiled(model)


def problem_of(trainer: Trainer) -> str | None:
    """Returns why training steps of a module cannot be compiled, as far as it is known before a step, or None."""
    module, strategy = trainer.lightning_module, strategy_of(trainer)
    name = type(module).__name__
    if problem := compiler_problem(strategy.root_device) or tracing_problem():
        return problem
    if not has_stock_optimizer_step(trainer):
        return f"{name} or a callback overrides part of the optimizer step, or the precision needs a gradient scaler"
    if any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        return "SyncBatchNorm exchanges statistics within the forward pass"
    if strategy.needs_wrapper:
        return "a communication hook of DistributedDataParallel averages the gradients"
    if torch.is_anomaly_enabled():
        return "anomaly detection is enabled"
    return None
