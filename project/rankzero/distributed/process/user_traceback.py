"""Tracebacks without the frames of libraries and of Rankzero. Does not import torch."""

import sysconfig
import traceback
from pathlib import Path

from rankzero.messages import is_in_package

_STDLIB = sysconfig.get_paths()["stdlib"]

OWN_PACKAGES = ("rankzero", "data_modules", "lightning_modules")


def is_user_file(file: str) -> bool:
    """Whether a source file belongs to the user, and not to a library or Rankzero."""
    is_library = "site-packages" in file or "dist-packages" in file or file.startswith((_STDLIB, "<"))
    return not is_library and not is_in_package(Path(file), *OWN_PACKAGES)


def user_position(error: BaseException) -> str:
    """Returns the innermost line of the user's code in an error's traceback, such as `train.py:34 in training_step`.

    Returns an empty string if the traceback contains none.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def user_frames(error: BaseException) -> list[str]:
    """Formats the traceback of an error and of its causes, without the frames of libraries and of Rankzero.

    If a traceback has no other frames, all of them are kept.
    """
    return _user_frames(traceback.TracebackException.from_exception(error))


def _user_frames(trace: traceback.TracebackException) -> list[str]:
    if getattr(trace, "exceptions", None):  # an exception group: its format includes the nested exceptions
        return list(trace.format())
    cause, relation = trace.__cause__, "\nThe above exception was the direct cause of the following exception:\n\n"
    if cause is None and not trace.__suppress_context__:
        cause, relation = trace.__context__, "\nDuring handling of the above exception, another exception occurred:\n\n"
    causes = [*_user_frames(cause), relation] if cause else []
    frames = [
        frame
        for frame in trace.stack
        if "site-packages" not in frame.filename and not is_in_package(Path(frame.filename), *OWN_PACKAGES)
    ]
    omitted = len(trace.stack) - len(frames) if frames else 0
    header = f"Traceback (most recent call last{f'; {omitted} frames of libraries omitted' if omitted else ''}):\n"
    return [*causes, header, *traceback.format_list(frames or trace.stack), *trace.format_exception_only()]
