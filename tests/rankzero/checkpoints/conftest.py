"""Fixtures for damaged and malicious checkpoints."""

import hashlib

import pytest
import torch
from checkpoint_files import load, save

from rankzero.checkpoints.manifest import MANIFEST, STATE, manifest_text, newest_valid, read_manifest
from rankzero.checkpoints.write import write_directory
from rankzero.messages import CannotStart


@pytest.fixture
def valid_checkpoint(tmp_path):
    content = {"epoch": 1, "global_step": 20, "state_dict": {"w": torch.arange(64.0)}, "rankzero": {"run": "x"}}
    write_directory(content, tmp_path / "step-00000020")
    return tmp_path / "step-00000020"


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path, step)
    return tmp_path


@pytest.fixture
def message_of():
    """Returns a function that checks that a checkpoint cannot be read, and returns the printed message."""

    def read(path, **options):
        with pytest.raises(ValueError) as error:
            load(path, **options)
        assert isinstance(error.value, CannotStart) and path.name in str(error.value)
        assert len(str(error.value)) < 1500 and "\x1b" not in str(error.value)
        return str(error.value)

    return read


@pytest.fixture
def refusal_of(message_of):
    """Returns a function that checks that a checkpoint is refused, and returns why no run resumes from it."""

    def read_reason(path):
        message_of(path)
        newest, reasons = newest_valid(path.parent)
        assert newest is None and len(reasons) == 1 and path.name in reasons[0]
        return reasons[0]

    return read_reason


@pytest.fixture
def write_manifest():
    """Returns a function that changes a checkpoint and writes a valid manifest, as an attacker can."""

    def write(path, state: bytes | None = None, without=(), **changes):
        if state is not None:
            (path / STATE).write_bytes(state)
        data = (path / STATE).read_bytes()
        description = {STATE: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        content = {**read_manifest(path), "files": description, **changes}
        kept = {key: value for key, value in content.items() if key not in ("sha256", *without)}
        (path / MANIFEST).write_text(manifest_text(kept))

    return write
