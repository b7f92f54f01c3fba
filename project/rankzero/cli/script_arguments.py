"""Arguments of the Trainer and of its methods in a script: read like flags, and refused with what to write instead."""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from rankzero.cli.flags import flags_of
from rankzero.cli.foreign_flags import equivalent_flag
from rankzero.distributed.coordination.session import report_uncaught_errors
from rankzero.distributed.process.lightning_names import check_base
from rankzero.messages import WrongArgumentError, mark_refusal, nearest, user_message

TRAINER_FLAGS = {flag.name: flag for flag in flags_of("fit") if flag.lightning_key is None or flag.name == "seed"}
"""Flags that Rankzero adds to the arguments of the Trainer; all other flags stand for Lightning's arguments."""

_KEYS = {name: flag.lightning_key or name for flag in flags_of("fit") for name in (flag.name, *flag.aliases)}

_SHELL_COMMAND = re.compile(r" *(type +)?(or )?(srun|mpirun|torchrun|pbsdsh|python|[A-Z_]+=\S+) ")


def argument_of(flag: str) -> str:
    """Returns the argument of the Trainer for a flag: `max_epochs` for `epochs`."""
    return "seed" if flag == "seed" else _KEYS.get(flag, flag).rpartition(".")[2]


def as_arguments(text: str) -> str:
    """Spells flags as arguments of the Trainer: `--save_every 200steps` as `save_every="200steps"`.

    `--model NAME` becomes `the model NAME`, since the model is no argument. In shell command lines, only the name of
    the script changes.
    """

    def as_argument(match: re.Match[str]) -> str:
        flag, value = match[1], match[2] and match[2].strip("'")
        name = argument_of(flag)
        if value and name in ("model", "data"):
            return f"the {name} {value}"
        if value is None or value in ("or", "and", "with", "for", "in", "to", "is", "on", "out"):
            return name + (f" {value}" if value else "")
        is_unquoted = value.isupper() or value in ("None", "True", "False") or re.fullmatch(r"-?[0-9.]+", value)
        return f"{name}={value}" if is_unquoted else f'{name}="{value}"'

    text = text.replace("launch/fit.py", Path(sys.argv[0]).name or "train.py")
    lines = text.replace("the same command", "the same script").split("\n")
    flag_pattern = r"--([a-z_.]*[a-z_])(?: ('[^']*'|[^\s,;()]*[^\s,;().]))?"
    return "\n".join(line if _SHELL_COMMAND.match(line) else re.sub(flag_pattern, as_argument, line) for line in lines)


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Reads Rankzero's arguments of the Trainer in the same way as the flags of the same names.

    Raises:
        RequestError: A value is not valid for its flag.
    """
    return {
        name: TRAINER_FLAGS[name].default if value is None else TRAINER_FLAGS[name].value(_as_text(value))
        for name, value in arguments.items()
    }


def as_list(value: Any) -> list[Any]:
    """Returns the items of an argument that may be None, one item or several, as in OmegaConf's ListConfig."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _as_text(value: Any) -> str:
    """Returns an argument as the user would type it after its flag."""
    if isinstance(value, timedelta):
        return f"{math.ceil(value.total_seconds())}s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    is_text = isinstance(value, str) or not isinstance(value, Sequence | set)
    return str(value) if is_text else ",".join(map(str, value))


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
    if unknown := [name for name in named if name not in names]:
        similar = [name for name in (_similar(name, names) for name in unknown) if name]
        raise WrongArgumentError(
            f"{call}({', '.join(f'{name}=...' for name in unknown)})",
            f"it has no argument {' or '.join(unknown)}",
            ", ".join(f"{name}=..." for name in similar) or f"one of {', '.join(names)}",
        )


def _similar(name: str, names: Sequence[str]) -> str | None:
    """Returns the argument for a flag, or for a name of another trainer's, or the most similar one."""
    flag = re.match("--([a-z_.]+)", equivalent_flag(name, None, [flag.name for flag in flags_of("fit")], "") or "")
    candidates = (argument_of(name), argument_of(flag[1]) if flag else "")
    return next((candidate for candidate in candidates if candidate in names), None) or nearest(name, names)


def _check_values(call: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    if (model := values.get("model")) is not None:
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
