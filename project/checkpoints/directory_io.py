"""A checkpoint as a directory: the state, and a manifest that is written last.

checkpoints/step-00001234/
  state.pt         what Lightning saves
  manifest.json    format, epoch, step, and size and sha256 of each file
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

FORMAT = 2
"""1 knew no position within an epoch, and another order of samples."""
STATE, MANIFEST = "state.pt", "manifest.json"


class DirectoryCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their place and renames them into it; reads them with `weights_only=True`.

    A path that ends in .ckpt is one file, as Lightning's own: that is how a user's ModelCheckpoint goes on working.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        place = Path(path)
        if place.suffix == ".ckpt":
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        beside = place.with_name(f".{place.name}.saving")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        with (beside / STATE).open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": FORMAT,
            "epoch": checkpoint.get("epoch"),
            "step": checkpoint.get("global_step"),
            "rankzero": checkpoint.get("rankzero", {}),
            "files": {STATE: _describe(beside / STATE)},
        }
        with (beside / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(beside)
        if place.exists():
            shutil.rmtree(place)
        beside.rename(place)
        _sync_folder(place.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        place = Path(path)
        if place.is_dir():
            verify(place)
            place = place / STATE
        if not place.is_file():
            raise FileNotFoundError(f"there is no checkpoint at {place}")
        weights_only = True if weights_only is None else weights_only
        loaded: dict[str, Any] = torch.load(place, map_location=map_location or "cpu", weights_only=weights_only)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            super().remove_checkpoint(path)


def read_manifest(checkpoint: Path) -> Mapping[str, Any]:
    """Reads the manifest of a checkpoint directory.

    Raises:
        ValueError: There is none, or it is not whole, or of a format that is not known.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{checkpoint} is no finished checkpoint: {MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{checkpoint}: {MANIFEST} is not of format {FORMAT}")
    return manifest


def verify(checkpoint: Path) -> None:
    """Holds the files of a checkpoint against its manifest.

    Raises:
        ValueError: A file is missing or is not what was written.
    """
    for name, expected in read_manifest(checkpoint)["files"].items():
        file = checkpoint / Path(name).name
        if not file.is_file():
            raise ValueError(f"{checkpoint}: {name} is missing")
        if _describe(file) != expected:
            raise ValueError(f"{checkpoint}: {name} is not what was written (size or sha256 differ)")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; one that is still being written is not among them."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in a folder that verifies.

    Returns:
        Its path, or None; and why each newer one was refused.
    """
    refused = []
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            verify(checkpoint)
        except (OSError, ValueError) as error:
            refused.append(str(error))
        else:
            return checkpoint, refused
    return None, refused


def _describe(file: Path) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
