"""Finds the checkpoint at a path that the user has typed. Does not import torch."""

import os
from collections.abc import Callable
from pathlib import Path

from rankzero.messages import RequestError, nearest
from rankzero.runs.checkpoints.manifest import VerifiedState, checkpoints_in, newest_valid, open_newest, open_verified
from rankzero.runs.directory import expanded

_EXAMPLE = "runs/NAME/checkpoints/step-00000100"


def requested_checkpoint(text: str, keep: Callable[[VerifiedState], object] | None = None) -> Path:
    """Returns the checkpoint at the path of `--resume` or `--checkpoint`; in a run's directory, the newest valid one.

    Args:
        text: The path.
        keep: Called with the state of a checkpoint directory, which has been read; by default, the state is closed.

    Raises:
        RequestError: There is no valid checkpoint at this path.
    """
    path = expanded(text)
    if not os.path.lexists(path):
        raise _no_such_checkpoint_error(text, path)
    if path.suffix == ".ckpt" and path.is_file():
        return path
    in_memory = None if keep else False
    state, refusals = open_newest(path / "checkpoints", in_memory)
    try:
        state = state or open_verified(path, in_memory)
    except (OSError, ValueError) as error:
        sibling = newest_valid(path.parent)[0]
        raise RequestError(
            f"the checkpoint {text}",
            "\n".join([*refusals, str(error)]),
            str(sibling or f"the path of a checkpoint, such as {_EXAMPLE}"),
        ) from None
    if keep:
        keep(state)
    else:
        state.file.close()
    return state.checkpoint


def _no_such_checkpoint_error(text: str, path: Path) -> RequestError:
    folder = path.parent
    if not folder.is_dir():
        found = f"there is no such file or folder, and no folder {folder}"
        return RequestError(f"the checkpoint {text}", found, f"the path of a checkpoint, such as {_EXAMPLE}")
    existing_names = [entry.name for entry in folder.glob("*.ckpt")] + [entry.name for entry in checkpoints_in(folder)]
    existing_names += [entry.parent.name for entry in folder.glob("*/run.json")]
    similar = nearest(path.name, existing_names) or (sorted(existing_names)[-1] if existing_names else None)
    names = f"; {folder.resolve()} contains {', '.join(sorted(existing_names)[-8:])}" if existing_names else ""
    newest_in_run = newest_valid(folder / "checkpoints")[0]
    instead = str(folder / similar if similar else newest_in_run or f"the path of a checkpoint, such as {_EXAMPLE}")
    return RequestError(f"the checkpoint {text}", f"there is no such file or folder{names}", instead)
