"""Signature that proves that a run of the same user wrote a checkpoint. Does not import torch.

The signature is an HMAC of the state file's name, size and sha256. Its key is a file that only the user can read
(`~/.config/rankzero/checkpoint.key`, or below XDG_CONFIG_HOME). Without a usable key, no checkpoint is signed and no
signature is accepted.
"""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from rankzero.distributed.connections.key_file import NoKeyError, load_key

KEY_FILE = "checkpoint.key"

_PURPOSE = "rankzero checkpoint, version 1"


def sign(name: str, description: Mapping[str, Any]) -> str:
    """Signs a state file with the user's key, and creates the key if the user has none.

    Args:
        name: Name of the file.
        description: `bytes` and `sha256` of the file.

    Raises:
        NoKeyError: The key cannot be used, or it does not exist and cannot be created.
    """
    return _hmac(load_key(KEY_FILE, create=True)[0], name, description)


def is_signed(name: str, description: Mapping[str, Any], claimed_signature: object) -> bool:
    """Returns whether `claimed_signature` is the signature of this file with this user's key."""
    if not isinstance(claimed_signature, str) or not claimed_signature.isascii():
        return False
    try:
        return hmac.compare_digest(_hmac(load_key(KEY_FILE, create=False)[0], name, description), claimed_signature)
    except NoKeyError:
        return False


def key_problem() -> str | None:
    """Returns why the user's key cannot be used; None if it can be used or does not exist yet."""
    try:
        load_key(KEY_FILE, create=False)
    except NoKeyError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else str(error)
    return None


def _hmac(key: bytes, name: str, description: Mapping[str, Any]) -> str:
    message = json.dumps([_PURPOSE, name, description["bytes"], description["sha256"]])
    return hmac.new(key, message.encode(), "sha256").hexdigest()
