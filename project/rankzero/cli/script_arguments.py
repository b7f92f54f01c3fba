"""The flags as arguments of `rankzero.Trainer`: reads them and spells them in messages. Does not import torch."""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rankzero.cli.flags.table import flags_of

TRAINER_FLAGS = {flag.name: flag for flag in flags_of("fit") if flag.lightning_key is None or flag.name == "seed"}
"""Flags that Rankzero adds to the arguments of the Trainer; all other flags stand for Lightning's arguments."""

_LIGHTNING_KEYS = {
    name: flag.lightning_key for flag in flags_of("fit") if flag.lightning_key for name in (flag.name, *flag.aliases)
}

_SHELL_COMMAND = re.compile(r"(or )?(srun|mpirun|torchrun|pbsdsh|python|[A-Z_]+=\S+) ")


def argument_of(flag: str) -> str:
    """Returns the argument of the Trainer for a flag: `max_epochs` for `epochs`."""
    return "seed" if flag == "seed" else _LIGHTNING_KEYS.get(flag, flag).rpartition(".")[2]


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


def explicit_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, as `read_arguments` returned them, that differ from their defaults."""
    return {name: value for name, value in arguments.items() if value != TRAINER_FLAGS[name].default}


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
