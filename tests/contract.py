"""Runs a user's script with stock Lightning's Trainer and with Rankzero's, and compares everything that it observes."""

import contextlib
import copy
import inspect
import itertools
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import rankzero
from rankzero.distributed.process.stop_signals import STOP_SIGNALS
from rankzero.messages import RequestError
from running import REPOSITORY, script_process
from stock import SILENT, differences

KEYS = {
    *("callbacks", "epoch", "global_step", "hparams_name", "hyper_parameters", "loops", "lr_schedulers"),
    *("optimizer_states", "pytorch-lightning_version", "state_dict"),
}


def table_rows():
    """Returns the first cell of each row of the table of differences in docs/trainer.md."""
    _, _, text = (REPOSITORY / "docs/trainer.md").read_text().partition("## Differences from Lightning")
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]


def rows_from(count, columns=4, seed=1):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


def loader(count=12, **settings):
    return DataLoader(TensorDataset(rows_from(count)), batch_size=2, **settings)


class Net(pl.LightningModule):
    """Tiny module that records what each step observes; its hooks record their calls."""

    def __init__(self, lr=0.1, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = rows_from(2)
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        self.seen = []

    def forward(self, inputs):
        return self.net(inputs)

    def observe(self, stage, batch, *numbers):
        while not isinstance(batch, torch.Tensor):  # collections of loaders
            batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
        outputs = self(batch)
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), self.training)
        flags = (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
        position = (self.trainer.current_epoch, self.trainer.global_step, self.trainer.is_last_batch)
        self.seen.append((stage, numbers, batch.clone(), outputs.detach().clone(), modes, flags, position))
        return outputs

    def training_step(self, batch, batch_idx):
        loss = self.observe("train", batch, batch_idx).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("mean", loss, on_step=True, on_epoch=True, batch_size=2)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.observe("val", batch, batch_idx, dataloader_idx).mean(), prog_bar=True)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test", self.observe("test", batch, batch_idx, dataloader_idx).mean())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.observe("predict", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def recording(kind, calls):
    """Returns a subclass of a callback or module whose hooks append their name and the position to a list."""

    def wrap(name, function):
        def hook(self, *arguments, **settings):
            trainer = self._trainer if isinstance(self, pl.LightningModule) else arguments[0]
            numbers = [argument for argument in arguments if isinstance(argument, int)]
            position = (trainer.global_step, trainer.current_epoch) if trainer else ()
            state = (trainer.state.fn, trainer.state.stage) if trainer else ()
            calls.append((kind.__name__, name, numbers, position, state))
            return function(self, *arguments, **settings)

        hook.__signature__ = inspect.signature(function)
        return hook

    hooks = {
        name: function for name, function in inspect.getmembers(kind, inspect.isfunction) if name.startswith("on_")
    }
    return type(kind.__name__, (kind,), {name: wrap(name, function) for name, function in hooks.items()})


class Watch(pl.Callback):
    """A user's callback with a state."""

    def state_dict(self):
        return {"watched": 1}


class Plain:
    """Turns values into ones that can be compared: paths relative to a folder, classes by name, no identities."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, value):
        if isinstance(value, bool | int | float | None | torch.Tensor):
            return copy.copy(value)
        if isinstance(value, str | Path):
            text = str(value).replace(str(self.folder), ".")
            return text.removeprefix("./")
        if isinstance(value, Mapping):
            return {str(key): self(entry) for key, entry in value.items()}
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        if isinstance(value, list | tuple):
            return [self(entry) for entry in value]
        if isinstance(value, Instance):
            return value
        if isinstance(value, MethodType | FunctionType):
            parameters = inspect.signature(value).parameters.values()
            return [(parameter.name, str(parameter.kind), repr(parameter.default)) for parameter in parameters]
        return Instance(value)


class Instance:
    """A value that is compared by its class: an instance of a subclass equals an instance of the class."""

    def __init__(self, value):
        self.kinds = [kind.__qualname__ for kind in (value if isinstance(value, type) else type(value)).__mro__]

    def __eq__(self, other):
        return other.kinds[0] in self.kinds

    def __repr__(self):
        return f"instance of {self.kinds[0]}"


def error_of(error):
    """Returns a description of an error; refusals of both have one description."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, RequestError | MisconfigurationException | ValueError | TypeError):
        return "refused"
    return f"{type(error).__name__}: {error}"


class Script:
    """What a script observes of one kind of Trainer, in a folder of its own."""

    def __init__(self, kind, folder):
        self.kind, self.folder, self.plain, self.seen, self.calls = kind, folder, Plain(folder), {}, []

    def trainer(self, **settings):
        callbacks = settings.pop("callbacks", None) or []
        callbacks = [*(callbacks if isinstance(callbacks, list) else [callbacks]), recording(Watch, self.calls)()]
        return self.kind(**{**SILENT, "max_epochs": 2, "log_every_n_steps": 2, "callbacks": callbacks, **settings})

    def net(self, kind=Net, **settings):
        return recording(kind, self.calls)(**settings)

    def note(self, **values):
        for name, value in values.items():
            assert name not in self.seen
            self.seen[name] = self.plain(value)

    def call(self, name, function, *arguments, **settings):
        """Calls a function, and notes its result or its error."""
        try:
            result = function(*arguments, **settings)
        except Exception as error:
            result = error_of(error)
        self.note(**{name: result})
        return result

    def note_state(self, trainer, net, label=""):
        """Notes weights, optimizers, metrics, hook calls and step observations; saves apart from the other hooks."""
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        metrics = {"callback": trainer.callback_metrics, "logged": trainer.logged_metrics}
        metrics["bar"] = trainer.progress_bar_metrics
        self.note(**{f"{label}weights": net.state_dict(), f"{label}optimizers": optimizers, f"{label}metrics": metrics})
        saves = [call[1] == "on_save_checkpoint" for call in self.calls]
        calls = [call for call, is_save in zip(self.calls, saves, strict=True) if not is_save]
        self.note(**{f"{label}seen": net.seen, f"{label}calls": calls, f"{label}saves": sum(saves)})

    def files(self, folder="."):
        """Returns the files below a folder, without those of the run and of TensorBoard's numbered events."""
        found = sorted(path.relative_to(self.folder) for path in (self.folder / folder).rglob("*") if path.is_file())
        return [re.sub(r"tfevents.*", "tfevents", str(path)) for path in found if path.parts[0] != "runs"]


REPLACED = ("__init__", "__setattr__", "__delattr__")
"""Methods that Lightning (2.6) replaces while it asks for a loader, and leaves replaced if that fails."""


def observe(kind, scenario, folder, *arguments):
    """Runs a scenario, a function of a Script, as a script of its own, and returns what it observes."""
    folder.mkdir(parents=True)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    flags = (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
    methods = {(owner, name): vars(owner).get(name) for owner in (DataLoader, BatchSampler) for name in REPLACED}
    script = Script(kind, folder)
    with script_process(folder):
        try:
            scenario(script, *arguments)
        finally:
            for number, handler in handlers.items():  # stock Lightning leaves SIGINT ignored after a KeyboardInterrupt
                signal.signal(number, handler)
            for (owner, name), method in methods.items():
                if method:
                    setattr(owner, name, method)
                elif name in vars(owner):
                    delattr(owner, name)
            torch.backends.cudnn.benchmark = flags[0]
            torch.use_deterministic_algorithms(flags[1])
            torch.autograd.set_detect_anomaly(False)
            with contextlib.suppress(Exception):
                torch.distributed.destroy_process_group()
    return script.seen


def compare(scenario, folder, *arguments, differs=None):
    """Compares a scenario of both Trainers; `differs`: start of a path -> start of its row in docs/trainer.md."""
    expected = observe(pl.Trainer, scenario, folder / "stock", *arguments)
    check(observe(rankzero.Trainer, scenario, folder / "ours", *arguments), expected, differs or {})
    return expected


def check(found, expected, differs):
    rows = table_rows()
    assert all(any(row.startswith(start) for row in rows) for start in differs.values()), differs
    found = {**dict.fromkeys(expected, "not reached"), **found}
    expected = {**dict.fromkeys(found, "not reached"), **expected}
    unequal = differences({name: found[name] for name in expected}, expected)
    declared = {prefix: [path for path in unequal if path.startswith(f"/{prefix}")] for prefix in differs}
    assert all(declared.values()), f"equal, though declared as different: {declared}"
    rest = [path[:200] for path in unequal if not any(path in paths for paths in declared.values())]
    first = {key: list(paths)[:4] for key, paths in itertools.groupby(rest, key=lambda path: path.split("/")[1])}
    if rest:
        pytest.fail("\n".join(["ours != stock:", *itertools.chain(*first.values())]), pytrace=False)
