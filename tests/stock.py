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
from running import as_before

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


def note(seen, who, hook, trainer, arguments):
    """Records everything that a hook can observe."""
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    tensors = [argument.detach().clone() for argument in arguments if isinstance(argument, torch.Tensor)]
    outputs = [argument for argument in arguments if isinstance(argument, dict) and "loss" in argument]
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
    gradients = [parameter.grad is not None for parameter in trainer.lightning_module.parameters()]
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    place = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
    seen.append((who, hook, place, numbers, tensors, outputs, rates, gradients, metrics))


def every_hook(seen):
    """Returns a callback that implements every `on_...` hook except the checkpoint hooks."""

    def listener(hook):
        return lambda self, trainer, *arguments, **_: note(seen, "callback", hook, trainer, arguments)

    hooks = [name for name in vars(Callback) if name.startswith("on_") and "checkpoint" not in name]
    return type("EveryHook", (Callback,), {hook: listener(hook) for hook in hooks})()


def hooks_of_module(seen):
    """Returns recording functions for a module's batch hooks, by hook name."""

    def listener(hook):
        return lambda self, *arguments: note(seen, "module", hook, self.trainer, arguments)

    return {hook: listener(hook) for hook in batch_hooks.BATCH_HOOKS}


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


def train(ours, module, callbacks=(), loaders=None, val_loaders=None, **settings):
    """Trains with Rankzero's loop or with Lightning's, and returns all results and the trainer."""
    torch.manual_seed(5)
    curves, loaders = Curves(), loaders or Loaders()
    plan = SamplingPlan(micro_batches=settings.get("accumulate_grad_batches", 1))
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "accelerator": "cpu", **settings}
    if ours:
        settings["strategy"] = OneProcess(plan, device="cpu")
    with as_before():
        trainer = Trainer(
            logger=curves,
            enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            num_sanity_val_steps=0,
            **settings,
        )
        if ours:
            trainer.callbacks.insert(0, install(trainer, plan))
        trainer.fit(module, train_dataloaders=loaders(), val_dataloaders=(val_loaders or Loaders(2 * SIZE))())
    metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
    counts = trainer.fit_loop.state_dict()
    counts.pop("epoch_loop.state_dict", None)
    state = [one.state_dict() for one in (*trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs))]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "curves": curves.lines, "metrics": metrics, "state": state, "counts": counts}, trainer


def same(one, other):
    """Returns whether two structures are equal, tensors and numbers bit for bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def assert_same_training(make, settings, has_every_hook, folder):
    """Trains with Rankzero's loop and with Lightning's, and compares results, hook calls and what hooks observe.

    Args:
        make: Returns a module.
        settings: Settings of `train`; `callbacks` is a function that returns a list.
        has_every_hook: Whether to add a callback with every hook, and the batch hooks that the module lacks.
        folder: The trainers' root folder.
    """
    settings = dict(settings)
    make_callbacks, results, hooks = settings.pop("callbacks", list), [], []
    for ours in (True, False):
        seen = []
        module, callbacks = make(), make_callbacks()
        if has_every_hook:
            callbacks.append(every_hook(seen))
            methods = {name: hook for name, hook in hooks_of_module(seen).items() if name not in vars(type(module))}
            module.__class__ = type(type(module).__name__, (type(module),), methods)
        result, trainer = train(ours, module, callbacks, default_root_dir=folder, **settings)
        results.append(result)
        hooks.append(seen)
        assert not ours or isinstance(trainer.fit_loop.epoch_loop, EpochLoop)
    for part in results[0]:
        assert same(results[0][part], results[1][part]), part
    names = [[entry[:4] for entry in seen] for seen in hooks]
    assert names[0] == names[1]
    for ours, stock in zip(*hooks, strict=True):
        assert same(ours, stock), ours[:3]
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
        self.change, self.done = change, False
        setattr(self, hook, functools.partial(self._look, hook))

    def _look(self, hook, trainer, module, *arguments):
        if trainer.fit_loop.epoch_loop.batch_idx == 2 and not self.done:
            self.done = True
            self.change(self, trainer, module)


CHANGED_IN = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")
"""Hooks in which tests change something in the middle of an epoch."""


def assert_same_after_change(change, hook):
    """Trains with both loops while a callback changes something in the middle of an epoch, and compares all results.

    Args:
        change: Called with the callback, the trainer and the module; it may use the module's `seen` and `extra`.
        hook: The hook that calls `change`.
    """

    def observe(ours):
        module = type("Changed", (Net,), {})()
        module.seen, module.extra = [], Counts()
        before, after = Counts(), Counts()
        result, _ = train(ours, module, [before, AtBatch(change, hook), after])
        return {**result, "module": module.seen, "callbacks": [each.seen for each in (before, after, module.extra)]}

    ours, stock = observe(True), observe(False)
    for part in ours:
        assert same(ours[part], stock[part]), part


def counted(function, calls, name):
    """Wraps a function so that each call appends its name to a list."""

    @functools.wraps(function)
    def wrapper(*arguments, **settings):
        calls.append(name)
        return function(*arguments, **settings)

    return wrapper
