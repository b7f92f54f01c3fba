"""Small checkpoints that tests write, with and without code."""

import io
import os
from pathlib import Path
from typing import Any

import torch

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.write import write_directory


class CreatesFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (str(self.path), 0o777, True)


def content(step: int, **entries: Any) -> dict[str, Any]:
    return {"epoch": 1, "global_step": step, "w": torch.full((3,), step), "rankzero": {"run": "x"}, **entries}


def save(folder: Path, step: int, **entries: Any) -> Path:
    path = folder / f"step-{step:08d}"
    write_directory(content(step, **entries), path)
    return path


def load(path: Path, **options: Any) -> dict[str, Any]:
    """Reads a checkpoint with the plugin that a Trainer uses."""
    return DirectoryCheckpointIO(**options).load_checkpoint(path)


def serialized(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
