"""Hyperparameters in a checkpoint directory: plain values, and a text in place of every other value.

Lightning (2.6) stores the arguments of the module and the data module unchanged. An object among them (a module, a
`functools.partial`, a class) would make reading the whole checkpoint run code, and resuming a run does not need it.
`load_from_checkpoint` accepts the omitted values as arguments.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch

AS_TEXT = "_as_text"
"""Suffix of a key: `hyper_parameters_as_text` maps the names omitted from `hyper_parameters` to descriptions."""

TYPES = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
"""Maps Lightning's key of hyperparameters to Lightning's key of their container class."""

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES += (torch.dtype, torch.device, torch.Size)  # type: ignore[assignment]


class _NotPlainError(Exception):
    """Error for a value that cannot be read without running code."""


def with_plain_hyper_parameters(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a shallow copy of a checkpoint, with hyperparameters that can be read without running code."""
    plain = copy(checkpoint)
    for key, type_key in TYPES.items():
        if not isinstance(checkpoint.get(key), Mapping):
            continue
        plain[key], omitted = split(checkpoint[key])
        if omitted:
            plain[key + AS_TEXT] = omitted
        if isinstance(plain.get(type_key), type):  # given a name, Lightning loads an AttributeDict
            plain[type_key] = f"{plain[type_key].__module__}.{plain[type_key].__qualname__}"
    return plain


def omitted_hyper_parameters(checkpoint: Any) -> dict[str, str]:
    """Returns the descriptions of the hyperparameters that were omitted from a checkpoint, by name."""
    texts = [checkpoint.get(key + AS_TEXT) for key in TYPES] if isinstance(checkpoint, dict) else []
    entries = [entry for descriptions in texts if isinstance(descriptions, dict) for entry in descriptions.items()]
    return {str(name): str(text) for name, text in entries}


def split(hyper_parameters: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Splits hyperparameters into plain values and descriptions of all other values, both by name."""
    kept, omitted = {}, {}
    for name in hyper_parameters:
        value: Any = None
        try:
            value = hyper_parameters[name]
            kept[_plain(name)] = _plain(value)
        except Exception as error:  # containers of other libraries can raise any exception
            omitted[str(name)] = _description(value if isinstance(error, _NotPlainError) else error)
    return kept, omitted


def _plain(value: Any, enclosing_ids: tuple[int, ...] = ()) -> Any:
    """Returns a value with the same content that can be read without running code, or raises a `_NotPlainError`."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN_TYPES:
        return value
    if id(value) in enclosing_ids:
        raise _NotPlainError
    enclosing_ids = (*enclosing_ids, id(value))
    if isinstance(value, Mapping):
        return {_plain(key, enclosing_ids): _plain(value[key], enclosing_ids) for key in value}
    if type(value) in (tuple, set):
        return type(value)(_plain(item, enclosing_ids) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, tuple | str | bytes | range):
        return [_plain(item, enclosing_ids) for item in value]
    raise _NotPlainError


def _description(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__module__}.{type(value).__qualname__}, whose repr raises {type(error).__name__}>"
    return text[:300] + "..." * (len(text) > 300)
