"""The graph of a training step: the forward pass, the backward pass and, if possible, the optimizer's update.

`torch.compile` traces a function that calls the user's own `training_step`, then `torch.autograd.grad`, and then the
update of SGD, Adam or AdamW. In the trace, `self.log` and torchmetrics' metrics only record their arguments. The graph
returns these, and the recorded calls are made after it.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torchmetrics import Metric, MetricCollection

from rankzero.distributed.torch_inside import CannotCompileError, GraphFunction, has_gradient_hook
from rankzero.training.metrics.step_log import StepLog

Call = tuple[int, tuple[Any, ...], dict[str, Any]]
"""A recorded call: the index of the method, the arguments, and the keyword arguments."""

UPDATED = (SGD, Adam, AdamW)
"""Optimizers whose update may be part of the graph."""


class Deferred:
    """Stands in the trace for the result of a call that is made after the graph."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __bool__(self) -> bool:
        raise CannotCompileError("the result of a metric is read in training_step")


class StepGraph:
    """The compiled step of a module, with the parameters and the optimizer that it has now.

    A step without graph precedes it, in which the optimizer creates its state. `training_step` runs in the `context`.
    With `updates`, the graph also updates the parameters.
    """

    def __init__(
        self, module: LightningModule, optimizer: Optimizer, context: Callable[[], Any], updates: bool
    ) -> None:
        self.module, self.optimizer, self.updates, self._context = module, optimizer, updates, context
        self._all = list(module.parameters())
        self._are_trained = self._find_trained()
        self.parameters = [parameter for parameter in self._all if parameter.requires_grad]
        self._state, self._param_groups = optimizer.state, optimizer.param_groups
        self._counts = self._count_parameters()
        self._groups = [Group(optimizer, group, self.parameters) for group in optimizer.param_groups] if updates else []
        self._calls: list[Call] = []
        metrics = [metric for metric in module.modules() if isinstance(metric, Metric | MetricCollection)]
        methods = [(metric, name) for metric in metrics for name in ("forward", "update")]
        self._targets: list[tuple[Any, str]] = [(module, "log"), (module, "log_dict"), *methods]
        recorders = [(vars(owner), name, self._recorder(index)) for index, (owner, name) in enumerate(self._targets)]
        refused = [(vars(metric), name, _refuse) for metric in metrics for name in ("compute", "reset")]
        self._replaced: list[tuple[dict[str, Any], str, Callable[..., Any]]] = [*recorders, *refused]
        checked = ("self._groups", "self.parameters", "self.updates", "self._context", "rates")
        self.function = GraphFunction(self._step, self.parameters[0].device, checked)

    def is_current(self) -> bool:
        """Returns whether the module's parameters and the optimizer's settings are those of the graph."""
        optimizer = self.optimizer
        return (
            self._find_trained() == self._are_trained
            and optimizer.param_groups is self._param_groups
            and self._count_parameters() == self._counts
            and (not self.updates or optimizer.state is self._state)
            and not self.settings_vary
        )

    @property
    def settings_vary(self) -> bool:
        """Whether a setting of the optimizer, other than the learning rate, is not that of the graph any more."""
        return not all(group.is_current() for group in self._groups)

    @property
    def problem(self) -> str | None:
        """Why the step cannot be compiled, as far as the parameters show it; None if it may be."""
        hooked = next((name for name, each in self.module.named_parameters() if has_gradient_hook(each)), None)
        if hooked:
            return f"{hooked} has a gradient hook"
        registered = set(map(id, self._all))
        is_complete = all(id(each) in registered for group in self._param_groups for each in group["params"])
        return None if is_complete else f"the optimizer has parameters that {type(self.module).__name__} has not"

    def _find_trained(self) -> list[bool]:
        """Returns for each parameter whether it is trained and has no gradient hook."""
        return [each.requires_grad and not has_gradient_hook(each) for each in self._all]

    def _count_parameters(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def run(self, batch: Any, batch_idx: int | None = None) -> tuple[Any, Sequence[Tensor | None], list[Call]]:
        """Returns the detached output of `training_step`, the gradients of `parameters`, and the recorded calls.

        Raises:
            CannotCompileError: The step cannot be compiled.
        """
        kept = [attributes.get(name, _MISSING) for attributes, name, _ in self._replaced]
        for attributes, name, replacement in self._replaced:
            attributes[name] = replacement
        try:
            output, gradients, calls = self.function(batch, batch_idx, [group.rate() for group in self._groups])
        finally:
            for (attributes, name, _), value in zip(self._replaced, kept, strict=True):
                if value is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = value
        if self.parameters[0].is_cuda:  # the next replay of a CUDA graph overwrites what it has returned
            output, gradients, calls = _mapped(Tensor, torch.clone, (output, gradients, calls))
        self._calls = []
        return output, gradients, calls

    def replay_calls(self, calls: Sequence[Call], output: Any) -> tuple[Any, list[Any]]:
        """Makes the recorded calls of `log` and of metrics; returns the output with their results, and the results."""
        results: list[Any] = []
        log = vars(self.module).get("log")
        for index, arguments, settings in calls:
            owner, name = self._targets[index]
            if isinstance(log, StepLog):  # the graph has copied the arguments, but not the results of metrics
                log.owns_values = not any(type(each) is Deferred for each in (*arguments, *settings.values()))
            results.append(getattr(owner, name)(*_with_results(arguments, results), **_with_results(settings, results)))
        if isinstance(log, StepLog):
            log.owns_values = False
        return _with_results(output, results), results

    def replace_stored(self, results: list[Any]) -> str | None:
        """Replaces what `training_step` has stored in place of results; returns the name of such an attribute."""
        attributes = [(vars(module), name) for module in self.module.modules() for name in vars(module)]
        stored = [(owner, name) for owner, name in attributes if _has_deferred(owner[name])]
        for owner, name in stored:
            owner[name] = _with_results(owner[name], results)
        return next((name for _, name in stored), None)

    def _step(self, step_batch: Any, step_index: int | None, rates: list[Tensor]) -> Any:
        """The traced function."""
        self._calls = []
        with self._context():
            arguments = (step_batch,) if step_index is None else (step_batch, step_index)
            output = self.module.training_step(*arguments)
        loss: Any = output["loss"] if isinstance(output, Mapping) else output
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        if self.updates:
            with torch.no_grad():
                for group, rate in zip(self._groups, rates, strict=True):
                    group.update(gradients, rate)
        return _mapped(Tensor, Tensor.detach, output), gradients, self._calls

    def _recorder(self, index: int) -> Callable[..., Deferred]:
        def record(*arguments: Any, **settings: Any) -> Deferred:
            self._calls.append((index, _mapped(Tensor, _copy, arguments), _mapped(Tensor, _copy, settings)))
            return Deferred(len(self._calls) - 1)

        return record


_MISSING = object()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _refuse(*_: Any, **__: Any) -> None:
    raise CannotCompileError("a metric that is read in training_step")


def sizes_in(batch: Any) -> list[torch.Size]:
    """Returns the shapes of the tensors in dictionaries, lists and tuples."""
    if isinstance(batch, Tensor):
        return [batch.shape]
    elements = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [shape for element in elements for shape in sizes_in(element)]


def _mapped(kind: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with a function applied to the objects of a class, in dictionaries, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(kind, function, element) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_mapped(kind, function, element) for element in value])
    return value


def _has_deferred(value: Any) -> bool:
    found: list[Deferred] = []
    _mapped(Deferred, found.append, value)
    return bool(found)


def _with_results(value: Any, results: list[Any]) -> Any:
    """Returns a value with the results of earlier calls in place of `Deferred`."""
    return _mapped(Deferred, lambda deferred: results[deferred.index], value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an optimizer's group, without its learning rate, which the graph takes as a tensor."""
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}


class Group:
    """A parameter group of the optimizer, as the graph updates it."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        index = {parameter: position for position, parameter in enumerate(parameters)}
        trained = [parameter for parameter in group["params"] if parameter in index and parameter.grad is not None]
        self._parameters, self._indices = trained, [index[parameter] for parameter in trained]
        self._others = [index[each] for each in group["params"] if each in index and each.grad is None]
        states = [optimizer.state.get(parameter, {}) for parameter in trained]
        self._states = {name: [state.get(name) for state in states] for name in (states[0] if states else ())}
        self._group, self._is_sgd = group, type(optimizer) is SGD
        self._settings = settings_of(group)
        self._read_settings = itemgetter(*self._settings)
        self._values = self._read_settings(group)
        self._rate = torch.zeros((), dtype=torch.float64)
        self._rate_memory = self._rate.numpy()

    def is_current(self) -> bool:
        """Returns whether, apart from the learning rate, the group has the settings of the graph."""
        return bool(self._read_settings(self._group) == self._values)

    def rate(self) -> Tensor:
        """Returns the learning rate as a tensor, so that another rate needs no other graph."""
        self._rate_memory[()] = self._group["lr"]  # 5 us faster than `fill_`
        return self._rate

    def update(self, gradients: Sequence[Tensor | None], rate: Tensor) -> None:
        """Updates the parameters; traced."""
        own: Any = [gradients[index] for index in self._indices]
        if any(gradient is None for gradient in own) or any(gradients[index] is not None for index in self._others):
            raise CannotCompileError("other parameters have a gradient than in the first step")
        states, settings = self._states, self._settings
        common = {name: settings[name] for name in ("weight_decay", "maximize")}
        common |= {"foreach": False, "fused": False, "lr": rate}
        if self._is_sgd:
            momentum = {name: settings[name] for name in ("momentum", "dampening", "nesterov")}
            buffers = states.get("momentum_buffer", [None] * len(own))
            sgd(self._parameters, own, buffers, has_sparse_grad=False, **momentum, **common)
            return
        moments = states["exp_avg"], states["exp_avg_sq"], states.get("max_exp_avg_sq", [])
        beta1, beta2 = settings["betas"]
        common |= {name: settings[name] for name in ("amsgrad", "eps", "decoupled_weight_decay")}
        adam(self._parameters, own, *moments, states["step"], beta1=beta1, beta2=beta2, **common)
