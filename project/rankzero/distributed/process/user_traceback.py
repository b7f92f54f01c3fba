"""Tracebacks without the frames of libraries and of Rankzero. Does not import torch."""

import traceback
from pathlib import Path

from rankzero.messages import is_in_package

OWN_PACKAGES = ("rankzero", "data_modules", "lightning_modules")


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
