"""Refuses wrong arguments of the Trainer and of its methods, and states what to write instead."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from rankzero.cli.flags.table import flags_of
from rankzero.cli.foreign_flags import equivalent_flag
from rankzero.cli.script_arguments import argument_of
from rankzero.distributed.coordination.session import report_uncaught_errors
from rankzero.distributed.process.lightning_names import check_base
from rankzero.messages import WrongArgumentError, mark_refusal, nearest, user_message

_FLAGS = tuple(flag.name for flag in flags_of("fit"))


def refuses_wrong_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method of the Trainer refuse unknown names, models that are no LightningModule, and misplaced data."""
    names = list(inspect.signature(method).parameters)[1:]
    call = f"trainer.{method.__name__}"

    @wraps(method)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        _check_names(call, named, names)
        _check_values(call, dict(zip(names, arguments, strict=False)) | named, names)
        return method(self, *arguments, **named)

    return checked


def refuses_wrong_settings(initialize: Callable[..., None]) -> Callable[..., None]:
    """Lets the Trainer's constructor refuse unknown names and settings that Lightning refuses.

    Arguments without names have the order of `lightning.pytorch.Trainer`.
    """
    names = list(inspect.signature(initialize).parameters)[1:]
    positional = list(inspect.signature(pl.Trainer.__init__).parameters)[1:]

    @wraps(initialize)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        report_uncaught_errors()
        _check_names("Trainer", named, names)
        try:
            initialize(self, **named | dict(zip(positional, arguments, strict=False)))
        except Exception as error:
            if user_message(error):
                mark_refusal(error)
            raise

    return checked


def _check_names(call: str, named: Mapping[str, Any], names: Sequence[str]) -> None:
    unknown = [name for name in named if name not in names]
    if unknown:
        similar = [name for name in (_similar(name, names) for name in unknown) if name]
        raise WrongArgumentError(
            f"{call}({', '.join(f'{name}=...' for name in unknown)})",
            f"it has no argument {' or '.join(unknown)}",
            ", ".join(f"{name}=..." for name in similar) or f"one of {', '.join(names)}",
        )


def _similar(name: str, names: Sequence[str]) -> str | None:
    """Returns the argument for a flag, or for a name of another trainer's, or the most similar one."""
    flag = re.match("--([a-z_.]+)", equivalent_flag(name, None, _FLAGS, "") or "")
    candidates = (argument_of(name), argument_of(flag[1]) if flag else "")
    return next((candidate for candidate in candidates if candidate in names), None) or nearest(name, names)


def _check_values(call: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    model = values.get("model")
    if model is not None:
        check_base(call, type(model))
        if not isinstance(getattr(model, "_orig_mod", model), pl.LightningModule):  # `torch.compile` wraps a model
            found = f"`model` must be a `LightningModule` or a compiled one, got `{type(model).__qualname__}`"
            raise WrongArgumentError(f"{call}(model)", found, f"{call}(MyModule(), ...)")
    loaders = next(name for name in names if name.endswith("dataloaders"))
    for name, value in values.items():
        if isinstance(value, type):
            raise WrongArgumentError(f"{call}({name}=...)", f"the class {value.__name__}", f"{value.__name__}()")
        if name == "datamodule" and isinstance(value, DataLoader):
            raise WrongArgumentError(f"{call}(datamodule=...)", "a DataLoader", f"{loaders}=...")
        if name == "val_dataloaders" and isinstance(value, pl.LightningDataModule):
            raise WrongArgumentError(f"{call}({name}=...)", "a LightningDataModule", "datamodule=...")
