"""Tracebacks without the frames of libraries and of Rankzero."""

import re
import sysconfig
import traceback
from pathlib import Path

from rankzero.messages import is_in_package

_STDLIB = sysconfig.get_paths()["stdlib"]

_FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)

OWN_PACKAGES = ("rankzero", "data_modules", "lightning_modules")


def is_user_file(file: str) -> bool:
    """Whether a source file belongs to the user, and not to a library or Rankzero."""
    return not (_is_library_file(file) or file.startswith("<") or _is_own_file(file))


def _is_library_file(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB) or file.endswith(".pyx")


def _is_own_file(file: str) -> bool:
    return is_in_package(Path(file), *OWN_PACKAGES)


def is_defect(error: BaseException) -> bool:
    """Whether an error was raised in Rankzero's own code, and not by a statement that explains it to the user."""
    frames = traceback.extract_tb(error.__traceback__)
    is_unexplained = isinstance(error, Exception) and not isinstance(error, RuntimeError | OSError)
    return bool(frames) and _is_own_file(frames[-1].filename) and is_unexplained


def user_position(error: BaseException) -> str:
    """Returns the innermost line of the user's code in an error's traceback, such as `train.py:34 in training_step`.

    Returns an empty string if the traceback contains none.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def user_frames(error: BaseException) -> list[str]:
    """Formats the traceback of an error and of its causes, without the frames of libraries and of Rankzero.

    If a traceback has no other frames, or ends in Rankzero's code, all of them are kept. In the traceback of a loader
    process, which is a part of the error's text, frames are left out too.
    """
    return _user_frames(traceback.TracebackException.from_exception(error))


def _user_frames(trace: traceback.TracebackException) -> list[str]:
    if getattr(trace, "exceptions", None):  # an exception group: its format includes the nested exceptions
        return list(trace.format())
    cause, relation = trace.__cause__, "\nThe above exception was the direct cause of the following exception:\n\n"
    if cause is None and not trace.__suppress_context__:
        cause, relation = trace.__context__, "\nDuring handling of the above exception, another exception occurred:\n\n"
    causes = [*_user_frames(cause), relation] if cause else []
    frames = [frame for frame in trace.stack if not (_is_library_file(frame.filename) or _is_own_file(frame.filename))]
    text = "".join(trace.format_exception_only())
    shown_text = _without_libraries(text)
    if (trace.stack and _is_own_file(trace.stack[-1].filename)) or not (frames or shown_text != text):
        frames = list(trace.stack)
    omitted = len(trace.stack) - len(frames)
    header = f"Traceback (most recent call last{f'; {omitted} frames of libraries omitted' if omitted else ''}):\n"
    return [*causes, header, *traceback.format_list(frames), shown_text]


def _without_libraries(text: str) -> str:
    """Leaves out the frames of libraries and of Rankzero from the traceback that the text of an error contains."""
    if not any(is_user_file(frame["file"]) for frame in _FRAME.finditer(text)):
        return text
    return _FRAME.sub(lambda frame: frame[0] if is_user_file(frame["file"]) else "", text)
