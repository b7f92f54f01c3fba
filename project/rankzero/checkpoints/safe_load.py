"""Reads checkpoints that may be malformed or malicious, without running code from them.

A checkpoint that runs code is read if its signature proves that a run of the same user wrote it. The signature is an
HMAC of the state file's name, size and sha256. Its key is a file that only the user can read
(`~/.config/rankzero/checkpoint.key`, or below XDG_CONFIG_HOME). Without a usable key, no checkpoint is signed and no
signature is accepted.
"""

import hmac
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch.serialization import get_unsafe_globals_in_checkpoint

from rankzero.checkpoints.manifest import (
    SIGNATURE,
    STATE,
    VerifiedState,
    directory_of,
    open_plain,
    open_verified,
    read_manifest,
)
from rankzero.distributed.connections.key import NoKeyError, load_key
from rankzero.messages import RequestError

KEY_FILE = "checkpoint.key"


def sign(description: Mapping[str, Any]) -> str:
    """Signs a state file with the user's key, and creates the key if the user has none.

    Raises:
        NoKeyError: The key cannot be used, or it does not exist and cannot be created.
    """
    return _hmac(load_key(KEY_FILE, create=True)[0], description)


def key_problem() -> str | None:
    """Returns why the user's key cannot be used; None if it can be used or does not exist yet."""
    try:
        load_key(KEY_FILE, create=False)
    except NoKeyError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else str(error)
    return None


def _hmac(key: bytes, description: Mapping[str, Any]) -> str:
    message = json.dumps(["rankzero checkpoint, version 1", STATE, description["bytes"], description["sha256"]])
    return hmac.new(key, message.encode(), "sha256").hexdigest()


ReadOnce = Callable[[Callable[[bool | None], tuple[BinaryIO, bool]]], tuple[BinaryIO, bool]]
"""Opens a file by calling its argument, if possible on one rank only; returns the result on all ranks.

The argument of the argument states whether to read the file into memory, as in `open_verified`.
"""


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL of fsspec, such as `s3://bucket/x.ckpt`."""
    return "://" in str(path)


def load(
    path: Path | str,
    map_location: Any = "cpu",
    trusted: bool = False,
    trusted_sha256: str = "",
    read_once: "ReadOnce | None" = None,
    verified: VerifiedState | None = None,
    trust_setting: str = "--trust_checkpoint yes",
) -> dict[str, Any]:
    """Reads a checkpoint directory, after verifying it against its manifest, or a .ckpt file.

    Args:
        path: Path or URL of the checkpoint.
        map_location: Device for the tensors, as in `torch.load`.
        trusted: Whether the checkpoint may contain more than tensors and plain types. Reading such a file can run any
            code. A directory with a valid signature of this user is always trusted.
        trusted_sha256: sha256 of a directory's state that is trusted as well; empty for none.
        read_once: Reads the file for all ranks, see `ReadOnce`; by default, this process reads it.
        verified: The state of this checkpoint, if this process has already read it.
        trust_setting: Flag or argument that the error message suggests for a checkpoint that is not trusted.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        RequestError: The checkpoint cannot be read, or would have to be trusted.
    """
    path = str(path) if is_remote(path) else directory_of(Path(path))
    open_file = partial(_open, path, trusted, trusted_sha256, verified)
    try:
        opened, trusted = read_once(open_file) if read_once else open_file(None)
        with opened as file:
            if not trusted:
                _check_archive(path, file)
            content = _read(path, file, map_location, trusted)
        if not isinstance(content, dict):
            raise ValueError(f"{path} contains a {type(content).__name__}; a checkpoint is a dict")
        return content
    except FileNotFoundError:
        raise
    except _NeedsTrustError as error:
        raise needs_trust_error(path, error.args[0], trust_setting) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"the checkpoint {path}", str(error), "the path of another checkpoint") from None


def signed_sha256_of(checkpoint: Path) -> str:
    """Returns `signed_sha256` of a checkpoint directory; empty for any other file."""
    checkpoint = directory_of(checkpoint)
    return signed_sha256(read_manifest(checkpoint)) if checkpoint.is_dir() else ""


def signed_sha256(manifest: Mapping[str, Any]) -> str:
    """Returns the sha256 of a state that runs code when read and that this user's key has signed; otherwise empty."""
    claimed = manifest.get(SIGNATURE)
    if manifest.get("needs") and isinstance(claimed, str) and claimed.isascii():
        description = manifest["files"][STATE]
        with suppress(NoKeyError):
            key, _ = load_key(KEY_FILE, create=False)
            return str(description["sha256"]) if hmac.compare_digest(_hmac(key, description), claimed) else ""
    return ""


def needs_trust_error(
    path: Path | str, names: Sequence[str], trust_setting: str = "--trust_checkpoint yes"
) -> RequestError:
    """Returns the error for a checkpoint that contains more than tensors and plain types."""
    shown = [re.sub(r"[^ -~]", "?", name)[:80] for name in names[:8]]
    shown += [f"and {len(names) - 8} more"] * (len(names) > 8)
    return RequestError(
        f"the checkpoint {path}",
        f"{path} contains more than tensors and plain types ({', '.join(shown)});\n"
        "such a file can run any code when it is loaded" + (f"\n{problem}" if (problem := key_problem()) else ""),
        f"{trust_setting}, if you trust its author",
    )


class _NeedsTrustError(ValueError):
    """Error with the list of the classes and functions that reading a checkpoint would call."""


def _open(
    path: Path | str, trusted: bool, trusted_sha256: str, verified: VerifiedState | None, in_memory: bool | None
) -> tuple[BinaryIO, bool]:
    """Opens a checkpoint, a directory after verification; returns the file, and whether reading it may run code."""
    if isinstance(path, str):
        return io.BytesIO(get_filesystem(path).cat_file(path)), trusted
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if not path.is_dir():
        return open_plain(path.resolve()), trusted  # `ModelCheckpoint(save_last="link")` saves a link
    manifest = read_manifest(path)
    sha256 = manifest["files"][STATE]["sha256"]
    is_trusted_state = bool(trusted_sha256) and hmac.compare_digest(trusted_sha256.encode(), sha256.encode())
    may_run_code = not trusted and (is_trusted_state or bool(signed_sha256(manifest)))
    # Another process could change a file between its verification and its use; what runs code is read from memory.
    if not verified or verified.checkpoint != path or verified.sha256 != sha256 or not verified.is_in_memory:
        verified = open_verified(path, in_memory=True if may_run_code else in_memory)
    return verified.file, trusted or may_run_code


def _read(path: Path | str, file: BinaryIO, map_location: Any, trusted: bool) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=not trusted)
    except Exception as error:  # a malicious file can cause any exception
        names = []
        with suppress(Exception):
            names = [] if trusted else required_globals(file)
        if not names:
            raise ValueError(f"{path} cannot be read: {_short_text(error)}") from None
    raise _NeedsTrustError(names)


def required_globals(file: BinaryIO) -> list[str]:
    """Returns the classes and functions that reading a file would call, except those that torch allows by default.

    Raises:
        UnpicklingError: torch cannot determine them. A malicious or damaged file can cause any other exception, too.
    """
    file.seek(0)
    return sorted(get_unsafe_globals_in_checkpoint(file))


def _check_archive(path: Path | str, file: BinaryIO) -> None:
    """Raises a ValueError unless the file is a zip archive of uncompressed entries that do not overlap."""
    size = file.seek(0, os.SEEK_END)
    # With the end record, of 22 bytes, at the very end of the file, every zip reader finds the same list of entries.
    file.seek(max(0, size - 22))
    has_end_record = file.read(4) == b"PK\x05\x06" and file.read()[-2:] == b"\0\0"
    file.seek(0)
    if not has_end_record or file.read(4) != b"PK\x03\x04":
        raise ValueError(f"{path} is not a checkpoint of torch.save: it is not a zip archive, or it is truncated")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises many types
        raise ValueError(f"{path} is a damaged zip archive: {_short_text(error)}") from None
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise ValueError(f"{path} contains compressed entries, which torch.save does not write")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"{path} has overlapping entries, so that it would unpack to more than its size")
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names) or any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise ValueError(f"{path} has duplicate entries, or entries with paths outside the archive")
    file.seek(0)


def _short_text(error: Exception) -> str:
    """Returns the type of an error and the first line of its text, without terminal colors."""
    text = str(error)
    if match := re.search(r"WeightsUnpickler error: *([^\n]+)", text):
        text = match[1]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()
    first_line = re.sub(r"[^ -~]", "?", lines[0])[:200] if lines else ""
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
