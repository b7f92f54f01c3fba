"""Hyperparameters as a checkpoint directory holds them: plain values, and a description of everything else.

Lightning (2.6) stores the arguments of the module and of the data module as they are. An object among them (a module,
a `functools.partial`, a class) would make the whole checkpoint one that runs code when it is read, and nothing that
resumes a run needs it. `load_from_checkpoint` takes what was left out as an argument.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

AS_TEXT = "_as_text"
"""`hyper_parameters_as_text` describes the entries that `hyper_parameters` lacks, by their names."""

TYPES = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Lightning's key of hyperparameters -> its key of the class that they come in."""

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter)
_LEAVES += (torch.dtype, torch.device, torch.Size)  # type: ignore[assignment]
_INT_BITS = 2000
_TEXT_LENGTH = 300


class _NotPlainError(Exception):
    """A value that cannot be read without running code."""


def with_plain_hyper_parameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint whose hyperparameters can be read without running code; changes nothing in the given one."""
    plain = copy(checkpoint)
    for key, type_key in TYPES.items():
        if not isinstance(checkpoint.get(key), Mapping):
            continue
        plain[key], left_out = split(checkpoint[key])
        if left_out:
            plain[key + AS_TEXT] = left_out
        if isinstance(plain.get(type_key), type):  # its name has Lightning load them with access by attribute
            plain[type_key] = f"{plain[type_key].__module__}.{plain[type_key].__qualname__}"
    return plain


def left_out_of(checkpoint: Any) -> dict[str, str]:
    """Returns the description of each hyperparameter that a checkpoint lacks, by its name."""
    texts = [checkpoint.get(key + AS_TEXT) for key in TYPES] if isinstance(checkpoint, dict) else []
    return {str(name): str(text) for part in texts if isinstance(part, dict) for name, text in part.items()}


def split(hyper_parameters: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Splits hyperparameters into those that are plain and a description of the others."""
    kept, left_out = {}, {}
    for name in hyper_parameters:
        value: Any = None
        try:
            value = hyper_parameters[name]
            kept[_plain(name)] = _plain(value)
        except Exception as error:  # containers of other libraries raise errors of their own
            left_out[str(name)] = _described(value if isinstance(error, _NotPlainError) else error)
    return kept, left_out


def _plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Returns a value of the same content that is read without running code.

    Raises:
        _NotPlainError: There is none.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _LEAVES:
        if type(value) is int and value.bit_length() > _INT_BITS:  # torch does not read longer ones
            raise _NotPlainError
        return value
    if id(value) in within:
        raise _NotPlainError
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return {_plain(key, within): _plain(value[key], within) for key in value}
    if type(value) in (tuple, set):
        return type(value)(_plain(item, within) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, tuple | str | bytes | range):
        return [_plain(item, within) for item in value]
    raise _NotPlainError


def _described(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__module__}.{type(value).__qualname__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= _TEXT_LENGTH else text[:_TEXT_LENGTH] + "..."
