"""Trains a module with Rankzero's loops and with Lightning's, and compares everything that the module can observe."""

import functools

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fast import batch_hooks
from rankzero.training.fit_loop import install
from rankzero.training.strategies import OneProcess
from running import restore_process_state

BATCHES, SIZE = 8, 4


class Curves(Logger):
    """Logger that keeps all values with their steps."""

    name, version = "curves", "0"

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *arguments):
        pass


class Net(LightningModule):
    """Module that logs in many ways; tests replace single methods."""

    def __init__(self, optimizer=None, schedule=None, **schedules):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
        self.error = torchmetrics.MeanAbsoluteError()
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.schedule, self.schedules = schedule, schedules

    def loss(self, batch):
        inputs, targets = batch
        outputs = self.net(inputs)
        self.error(outputs.detach(), targets)
        return nn.functional.mse_loss(outputs, targets)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log("mean", loss.double(), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("sum", loss, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", batch_idx * 0.5)
        self.log_dict({"whole": torch.tensor(batch_idx), "half": loss.half()})
        self.log("error", self.error)
        if batch_idx % 3 == 1:
            self.log("at times", loss, logger=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if not self.schedule:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), **self.schedules}}


def with_methods(name, **methods):
    """Returns a subclass of `Net` with some methods replaced."""
    return type(name, (Net,), methods)


def record(calls, source, hook, trainer, arguments):
    """Records everything that a hook can observe."""
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    tensors = [argument.detach().clone() for argument in arguments if isinstance(argument, torch.Tensor)]
    outputs = [argument for argument in arguments if isinstance(argument, dict) and "loss" in argument]
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
    gradients = [parameter.grad is not None for parameter in trainer.lightning_module.parameters()]
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    position = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
    calls.append((source, hook, position, numbers, tensors, outputs, rates, gradients, metrics))


def every_hook(calls):
    """Returns a callback that implements every `on_...` hook except the checkpoint hooks."""

    def recorder(hook):
        return lambda self, trainer, *arguments, **_: record(calls, "callback", hook, trainer, arguments)

    hooks = [name for name in vars(Callback) if name.startswith("on_") and "checkpoint" not in name]
    return type("EveryHook", (Callback,), {hook: recorder(hook) for hook in hooks})()


def hooks_of_module(calls):
    """Returns recording functions for a module's batch hooks, by hook name."""

    def recorder(hook):
        return lambda self, *arguments: record(calls, "module", hook, self.trainer, arguments)

    return {hook: recorder(hook) for hook in batch_hooks.BATCH_HOOKS}


class Loaders:
    """Creates loaders that read samples in a fixed order."""

    def __init__(self, count=BATCHES * SIZE, collate=None, **settings):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.rand(count, 3, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.collate, self.settings = collate, settings

    def __call__(self):
        return DataLoader(self.data, batch_size=SIZE, collate_fn=self.collate, **self.settings)


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(Loaders().data)


def train(uses_rankzero, module, callbacks=(), loaders=None, val_loaders=None, **settings):
    """Trains with Rankzero's loop or with Lightning's, and returns all results and the trainer."""
    torch.manual_seed(5)
    curves, loaders = Curves(), loaders or Loaders()
    plan = SamplingPlan(micro_batches=settings.get("accumulate_grad_batches", 1))
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "accelerator": "cpu", **settings}
    if uses_rankzero:
        settings["strategy"] = OneProcess(plan, device="cpu")
    with restore_process_state():
        trainer = Trainer(
            logger=curves,
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            num_sanity_val_steps=0,
            **settings,
        )
        if uses_rankzero:
            trainer.callbacks.insert(0, install(trainer, plan))
        trainer.fit(module, train_dataloaders=loaders(), val_dataloaders=(val_loaders or Loaders(2 * SIZE))())
    metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
    counts = trainer.fit_loop.state_dict()
    counts.pop("epoch_loop.state_dict", None)
    state = [
        instance.state_dict()
        for instance in (*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs))
    ]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "curves": curves.lines, "metrics": metrics, "state": state, "counts": counts}, trainer


def are_equal(left, right):
    """Returns whether two structures are equal, tensors and numbers bit for bit; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        if not isinstance(right, torch.Tensor) or (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(are_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return left == right or (left != left and right != right)


def assert_same_training(make_module, settings, has_every_hook, folder):
    """Trains with Rankzero's loop and with Lightning's, and compares results, hook calls and what hooks observe.

    Args:
        make_module: Returns a module.
        settings: Settings of `train`; `callbacks` is a function that returns a list.
        has_every_hook: Whether to add a callback with every hook, and the batch hooks that the module lacks.
        folder: The trainers' root folder.
    """
    settings = dict(settings)
    make_callbacks, results, hooks = settings.pop("callbacks", list), [], []
    for uses_rankzero in (True, False):
        calls = []
        module, callbacks = make_module(), make_callbacks()
        if has_every_hook:
            callbacks.append(every_hook(calls))
            methods = {name: hook for name, hook in hooks_of_module(calls).items() if name not in vars(type(module))}
            module.__class__ = type(type(module).__name__, (type(module),), methods)
        result, trainer = train(uses_rankzero, module, callbacks, default_root_dir=folder, **settings)
        results.append(result)
        hooks.append(calls)
        assert not uses_rankzero or isinstance(trainer.fit_loop.epoch_loop, EpochLoop)
    for key in results[0]:
        assert are_equal(results[0][key], results[1][key]), key
    names = [[entry[:4] for entry in calls] for calls in hooks]
    assert names[0] == names[1]
    for actual, stock in zip(*hooks, strict=True):
        assert are_equal(actual, stock), actual[:3]
    assert bool(hooks[0]) == has_every_hook


class Counts(Callback):
    """Records the calls of two hooks, with step and batch."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.seen.append(("zero", trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, sorted(outputs), trainer.global_step))


class AtBatch(Callback):
    """Calls a function once, in a hook of the third batch."""

    def __init__(self, change, hook="on_train_batch_end"):
        self.change, self.has_changed = change, False
        setattr(self, hook, functools.partial(self._change_once, hook))

    def _change_once(self, hook, trainer, module, *arguments):
        if trainer.fit_loop.epoch_loop.batch_idx == 2 and not self.has_changed:
            self.has_changed = True
            self.change(self, trainer, module)


CHANGE_HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
"""Hooks in which tests change something in the middle of an epoch."""


def assert_same_after_change(change, hook):
    """Trains with both loops while a callback changes something in the middle of an epoch, and compares all results.

    Args:
        change: Called with the callback, the trainer and the module; it may use the module's `seen` and `extra`.
        hook: The hook that calls `change`.
    """

    def observe(uses_rankzero):
        module = type("Changed", (Net,), {})()
        module.seen, module.extra = [], Counts()
        first, last = Counts(), Counts()
        result, _ = train(uses_rankzero, module, [first, AtBatch(change, hook), last])
        return {
            **result,
            "module": module.seen,
            "callbacks": [counter.seen for counter in (first, last, module.extra)],
        }

    actual, stock = observe(True), observe(False)
    for key in actual:
        assert are_equal(actual[key], stock[key]), key


def log_calls(function, calls, name):
    """Wraps a function so that each call appends its name to a list."""

    @functools.wraps(function)
    def wrapper(*arguments, **settings):
        calls.append(name)
        return function(*arguments, **settings)

    return wrapper
