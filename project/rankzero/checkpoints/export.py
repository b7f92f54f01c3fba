"""Export of a checkpoint's weights to a file that other programs can read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from rankzero.checkpoints.atomic_files import replacing, synced
from rankzero.checkpoints.safe_load import load
from rankzero.checkpoints.write import write_state
from rankzero.messages import RequestError


def export_weights(checkpoint: Path, file: Path, trusted: bool = False) -> str:
    """Writes the `state_dict` of a checkpoint to a .pt or .safetensors file, atomically.

    Returns:
        One line for the user: size of the file, and how to load it.

    Raises:
        RequestError: The checkpoint cannot be read or contains no weights, or the file cannot be written.
    """
    weights = _weights(checkpoint, trusted)
    is_safetensors = file.suffix == ".safetensors"
    try:
        with replacing(file) as temporary:
            _write_safetensors(weights, temporary) if is_safetensors else write_state(weights, temporary)
    except OSError as error:
        raise RequestError(f"--export {file}", str(error), "--export FILE, in a folder where you may write") from None
    tensors = [value for value in weights.values() if isinstance(value, Tensor)]
    value_count = sum(tensor.numel() for tensor in tensors)
    load_call = (
        f'safetensors.torch.load_file("{file}")' if is_safetensors else f'torch.load("{file}", weights_only=True)'
    )
    return (
        f"wrote {file}: {len(tensors)} tensors, {value_count:,} parameters and buffers, {file.stat().st_size:,} bytes; "
        f"to load it: model.load_state_dict({load_call})"
    )


def _weights(checkpoint: Path, trusted: bool) -> Mapping[str, Any]:
    weights = load(checkpoint, trusted=trusted).get("state_dict")
    if not isinstance(weights, dict) or not weights:
        raise RequestError(f"the checkpoint {checkpoint}", "it contains no weights", "the path of another checkpoint")
    return weights


def _write_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """Writes the tensors; those that share memory become separate copies, as the format has no shared memory."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    contiguous = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    with synced(path) as file:
        file.write(safetensors.torch.save(contiguous, {"format": "pt"}))
