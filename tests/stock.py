"""Trains a module with Rankzero's loops and with Lightning's, and compares everything that the module can observe."""

import functools
import sys

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.epoch_loop import EpochLoop
from rankzero.training.fit_loop import install
from rankzero.training.lightning_inside import BATCH_HOOKS
from rankzero.training.strategies import OneProcess
from running import restore_process_state

BATCHES, SIZE = 8, 4
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
SILENT = {**QUIET, "logger": False, "enable_checkpointing": False}


class Curves(Logger):
    name, version = "curves", "0"

    def __init__(self):
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


class ManualNet(Net):
    """Module with manual optimization that steps two optimizers in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def with_methods(name, **methods):
    return type(name, (Net,), methods)


def record(calls, source, hook, trainer, arguments):
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    tensors = [argument.detach().clone() for argument in arguments if isinstance(argument, torch.Tensor)]
    outputs = [argument for argument in arguments if isinstance(argument, dict) and "loss" in argument]
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []
    gradients = [parameter.grad is not None for parameter in trainer.lightning_module.parameters()]
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    position = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
    position += (trainer.lightning_module._current_fx_name,)
    calls.append((source, hook, position, numbers, tensors, outputs, rates, gradients, metrics))


def every_hook(calls):
    """Returns a callback that implements every hook except the checkpoint hooks."""

    def recorder(hook):
        return lambda self, trainer, *arguments, **_: record(calls, "callback", hook, trainer, arguments)

    names = [name for name in vars(Callback) if name.startswith(("on_", "setup", "teardown"))]
    hooks = {name: recorder(name) for name in names if "checkpoint" not in name}
    return type("EveryHook", (Callback,), hooks)()


class Unsized(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class Loaders:
    def __init__(self, count=BATCHES * SIZE, collate=None, has_length=True, **settings):
        inputs = torch.rand(count, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.data = data if has_length else Unsized(data)
        self.collate, self.settings = collate, settings

    def __call__(self):
        return DataLoader(self.data, batch_size=SIZE, collate_fn=self.collate, **self.settings)


def train(uses_rankzero, module, callbacks=(), loaders=None, val_loaders=None, **settings):
    """Trains with Rankzero's loop or with Lightning's, and returns all results and the trainer."""
    torch.manual_seed(5)
    curves, loaders, callbacks = Curves(), loaders or Loaders(), list(callbacks)
    plan = SamplingPlan(micro_batches=settings.get("accumulate_grad_batches", 1))
    settings = {**QUIET, "max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0, **settings}
    settings["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if uses_rankzero:
        settings["strategy"] = OneProcess(plan, device="cpu")
    with restore_process_state():
        trainer = Trainer(logger=curves, callbacks=callbacks, **settings)
        if uses_rankzero:
            trainer.callbacks.insert(0, install(trainer, plan))
        trainer.fit(module, train_dataloaders=loaders(), val_dataloaders=(val_loaders or Loaders(2 * SIZE))())
    metrics = {**trainer.callback_metrics, **trainer.logged_metrics}
    counts = trainer.fit_loop.state_dict()
    counts.pop("epoch_loop.state_dict", None)
    schedules = (config.scheduler for config in trainer.lr_scheduler_configs)
    state = [instance.state_dict() for instance in (*trainer.optimizers, *schedules)]
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "curves": curves.lines, "metrics": metrics, "state": state, "counts": counts}, trainer


def observe(uses_rankzero, make_module=Net, make_callbacks=list, has_every_hook=False, **settings):
    """Trains a new module, on request with every hook; returns results, hook calls, and all lists `seen`."""
    calls, module, callbacks = [], make_module(), make_callbacks()

    def recorder(hook):
        return lambda self, *arguments: record(calls, "module", hook, self.trainer, arguments)

    if has_every_hook:
        callbacks.append(every_hook(calls))
        methods = {name: recorder(name) for name in BATCH_HOOKS if name not in vars(type(module))}
        module.__class__ = type(type(module).__name__, (type(module),), methods)
    result, trainer = train(uses_rankzero, module, callbacks, **settings)
    assert not uses_rankzero or isinstance(trainer.fit_loop.epoch_loop, EpochLoop)
    seen = [list(observer.seen) for observer in (module, *callbacks) if hasattr(observer, "seen")]
    return {**result, "calls": calls, "seen": seen}


def observe_error(uses_rankzero, make_module, make_callbacks=list):
    """Trains a module whose training fails, and returns the error, the step, and the module's current hook name."""
    module = make_module()
    with pytest.raises(Exception) as error:
        train(uses_rankzero, module, make_callbacks())
    return type(error.value).__name__, str(error.value), module.trainer.global_step, module._current_fx_name


@functools.cache
def of_stock(observe, *arguments, **settings):
    """Returns what a function observes with stock Lightning, which it does once for the same arguments."""
    return observe(False, *arguments, **settings)


def assert_equals_stock(observe, *arguments, **settings):
    """Compares what a function observes with Rankzero and with stock Lightning, bit for bit, and returns it."""
    actual = observe(True, *arguments, **settings)
    assert differences(actual, of_stock(observe, *arguments, **settings)) == []
    return actual


def assert_same_training(make_module=Net, make_callbacks=list, **settings):
    """Compares trainings with and without hooks in every place with one training of stock Lightning."""
    arguments = (make_module, make_callbacks)
    assert assert_equals_stock(observe, *arguments, True, **settings)["calls"]
    plain, stock = observe(True, *arguments, **settings), of_stock(observe, *arguments, True, **settings)
    assert differences(plain, {**stock, "calls": []}) == []


def differences(first, second, tolerance=0.0, path=""):
    """Returns the paths at which two nested values differ in type or by more than the tolerance; NaN equals NaN."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return [path]
        is_near = first == second
        if tolerance and first.is_floating_point():
            is_near |= (first - second).abs() <= tolerance
        return [] if bool((is_near | (first.isnan() & second.isnan())).all()) else [path]
    if isinstance(first, dict) and isinstance(second, dict) and list(first) == list(second):
        pairs = [(key, (first[key], second[key])) for key in first]
        return [found for key, pair in pairs for found in differences(*pair, tolerance, f"{path}/{key}")]
    if isinstance(first, list | tuple) and type(first) is type(second) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, tolerance, f"{path}/{number}")]
    is_near = isinstance(first, float) and isinstance(second, float) and abs(first - second) <= tolerance
    is_equal = type(first) is type(second) and (first == second or is_near or (first != first and second != second))
    return [] if is_equal else [f"{path}: {first!r} != {second!r}"]


class Counts(Callback):
    """Records the calls of three hooks, with step and batch."""

    def __init__(self, seen=None):
        self.seen = [] if seen is None else seen

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append(("start", batch_idx, module._current_fx_name))

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.seen.append(("zero", trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(("end", batch_idx, sorted(outputs), trainer.global_step))


def saves_to(file):
    """Returns a callback that saves a checkpoint at the end of training."""
    return LambdaCallback(on_train_end=lambda trainer, module: trainer.save_checkpoint(file))


class AtBatch(Callback):
    """Calls a function once, in a hook of the third batch, or at the start of the training or of the second epoch."""

    def __init__(self, change, hook="on_train_batch_end"):
        self.change, self.has_changed = change, False
        setattr(self, hook, functools.partial(self._change_once, hook))

    def _change_once(self, hook, trainer, module, *arguments):
        starts = {"on_train_start": True, "on_train_epoch_start": trainer.current_epoch == 1}
        if not self.has_changed and starts.get(hook, trainer.fit_loop.epoch_loop.batch_idx == 2):
            self.has_changed = True
            self.change(self, trainer, module)


def calls_of(functions, argument, work):
    """Returns an argument of each call of some functions while `work` runs, without replacing the functions."""
    calls, codes = [], {function.__code__ for function in functions}

    def record_call(frame, event, _):
        if event == "call" and frame.f_code in codes:
            calls.append(frame.f_locals.get(argument, ""))

    sys.setprofile(record_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def log_calls(function, calls, name):
    """Wraps a function so that each call appends its name to a list."""

    @functools.wraps(function)
    def wrapper(*arguments, **settings):
        calls.append(name)
        return function(*arguments, **settings)

    return wrapper
