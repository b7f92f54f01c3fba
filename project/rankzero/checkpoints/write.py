"""Atomic writes of checkpoints: a crash, a full disk or a power cut leaves no partial checkpoint."""

import contextlib
import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from rankzero.checkpoints.atomic_files import DELETING, SAVING, make_folder, replacing, sync_folder, synced
from rankzero.checkpoints.manifest import FORMAT, MANIFEST, REPLACED, SIGNATURE, STATE, is_valid, manifest_text
from rankzero.checkpoints.safe_load import load, required_globals, sign
from rankzero.distributed.connections.key import NoKeyError
from rankzero.messages import RequestError


class HashedFile:
    """File object for `torch.save` that counts and hashes the data. Writing and hashing release the GIL.

    Attributes:
        bytes: Number of bytes written.
        error: Error of the disk; None without one. torch raises a RuntimeError in its place.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.bytes = file, 0
        self._digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing: `synced` flushes the file once, after the last write."""

    @property
    def sha256(self) -> str:
        """Hash of all data written, as hexadecimal digits."""
        return self._digest.hexdigest()


def write_directory(checkpoint: dict[str, Any], target: Path) -> None:
    """Writes a checkpoint directory to a temporary path and renames it to `target`.

    An earlier checkpoint at `target` is kept as `.replaced` until the new one has its name.

    Raises:
        OSError: The disk refused a write. An earlier checkpoint is still valid; the new one is removed.
    """
    temporary = target.with_name(f".{target.name}{SAVING}")
    try:
        make_folder(target.parent)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_content(checkpoint, temporary)
        sync_folder(temporary)
        _move_to_target(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_state(checkpoint: Any, path: Path) -> HashedFile:
    """Writes one file with `torch.save`, and waits until it is on the disk. Returns its size and sha256."""
    with synced(path) as file:
        hashed = HashedFile(file)
        try:
            torch.save(checkpoint, hashed)  # type: ignore[arg-type]  # torch.save needs no more than write() and flush()
        except RuntimeError as error:
            raise (hashed.error or error) from None
    return hashed


def remove_directory(path: Path) -> None:
    """Removes a checkpoint directory; an interruption leaves either the whole checkpoint or none under its name."""
    deleting = path.with_name(f".{path.name}{DELETING}")
    shutil.rmtree(deleting, ignore_errors=True)
    path.rename(deleting)
    sync_folder(path.parent)
    shutil.rmtree(deleting)


def _write_content(checkpoint: dict[str, Any], folder: Path) -> None:
    state = write_state(checkpoint, folder / STATE)
    description = {"bytes": state.bytes, "sha256": state.sha256}
    with (folder / STATE).open("rb") as file:
        try:
            needs = required_globals(file)
        except pickle.UnpicklingError:  # for example because of an integer of a thousand digits
            needs = ["what torch cannot name"]
    manifest = {
        "format": FORMAT,
        "epoch": checkpoint.get("epoch"),
        "step": checkpoint.get("global_step"),
        "rankzero": checkpoint.get("rankzero", {}),
        "contents": sorted(map(str, checkpoint)),
        "needs": needs,
        "files": {STATE: description},
    }
    if needs:
        with contextlib.suppress(NoKeyError):  # unsigned, it is read only with --trust_checkpoint yes
            manifest[SIGNATURE] = sign(description)
    with synced(folder / MANIFEST) as file:
        file.write(manifest_text(manifest).encode())


def _move_to_target(temporary: Path, target: Path) -> None:
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        if replaced.exists():  # left by an interrupted save: keep the newer one unless it is damaged
            remove_directory(replaced if is_valid(target) else target)
        if target.exists():
            target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        with contextlib.suppress(OSError):
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    if replaced.exists():
        with contextlib.suppress(OSError):  # the new one is safe; `clean` removes the old one later
            remove_directory(replaced)


def export_weights(checkpoint: Path, file: Path, trusted: bool = False) -> str:
    """Writes the `state_dict` of a checkpoint to a .pt or .safetensors file, atomically.

    Returns:
        One line for the user: size of the file, and how to load it.

    Raises:
        RequestError: The checkpoint cannot be read or contains no weights, or the file cannot be written.
    """
    weights = load(checkpoint, trusted=trusted).get("state_dict")
    if not isinstance(weights, dict) or not weights:
        raise RequestError(f"the checkpoint {checkpoint}", "it contains no weights", "the path of another checkpoint")
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    load_call = f'torch.load("{file}", weights_only=True)'
    try:
        with replacing(file) as temporary:
            if file.suffix == ".safetensors":
                # Tensors that share memory become separate copies, as the format has no shared memory.
                contiguous = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
                with synced(temporary) as stream:
                    stream.write(safetensors.torch.save(contiguous, {"format": "pt"}))
                load_call = f'safetensors.torch.load_file("{file}")'
            else:
                write_state(weights, temporary)
    except OSError as error:
        raise RequestError(f"--export {file}", str(error), "--export FILE, in a folder where you may write") from None
    value_count = sum(tensor.numel() for tensor in tensors.values())
    return (
        f"wrote {file}: {len(tensors)} tensors, {value_count:,} parameters and buffers, {file.stat().st_size:,} bytes; "
        f"to load it: model.load_state_dict({load_call})"
    )
