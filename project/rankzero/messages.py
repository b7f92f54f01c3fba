"""Exit codes, errors reported without a traceback, and printing that never raises. Does not import torch."""

import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path

from typing_extensions import override


class Exit(IntEnum):
    """Exit codes of every command in `launch/`."""

    FINISHED = 0
    FAILED = 1
    WRONG_REQUEST = 2
    """Nothing was started; the message states what was requested, what was found and what to type instead."""
    STOPPED = 75
    """Stopped early at a safe point; the same command resumes the run."""


TIME_LIMIT_REACHED = "the time limit"


class Stopped(SystemExit):
    """Raised on all ranks when a run stops at a safe point, with its checkpoint saved, or before training begins.

    It is a SystemExit, so a script that does not catch it exits with the same code as the command line.

    Args:
        reason: Why the run stops, such as a signal's name or `TIME_LIMIT_REACHED`.

    Attributes:
        exit_code: The code of all stops of this process, which `--stopped_exit_code` sets.
    """

    exit_code: int = Exit.STOPPED

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.code = reason, int(self.exit_code)


class CannotStart(ValueError):  # noqa: N818 - users read this name
    """Raised when nothing was started; the message states the reason and what to do.

    Attributes:
        reported_elsewhere: Whether another process prints the message; None means that the reporting rank prints it.
        is_remote: Whether that other process runs on another machine, whose output may go to another terminal.
        local_only: Whether possibly only this process found the error, so that rank zero's message may not state it.
        in_rendezvous: Whether the ranks did not find one another.
    """

    reported_elsewhere: bool | None = None
    is_remote = local_only = in_rendezvous = False

    @property
    def summary(self) -> str:
        """The reason in one line."""
        return _first_line(str(self))

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython prints, in a notebook too, in place of a traceback."""
        return [f"rankzero: cannot start\n{self}"]


class RequestError(CannotStart):
    """A request that cannot be fulfilled.

    Args:
        asked: The request as the user typed it: the flag and its value.
        found: The fact that prevents it.
        instead: The command line or the flag to type instead.
    """

    def __init__(self, asked: str, found: str, instead: str) -> None:
        super().__init__(asked, found, instead)
        self.asked, self.found, self.instead = asked, found, instead

    @property
    @override
    def summary(self) -> str:
        return _first_line(spelled(self.found))

    def __str__(self) -> str:
        """Returns the three printed lines, labeled `asked`, `found` and `type`."""
        asked, found, instead = map(spelled, (self.asked, self.found, self.instead))
        rows = (("asked", _shortened(asked)), ("found", _shortened(found)), ("type", instead))
        return "\n".join(f"  {label:<7}" + printable(text).replace("\n", "\n" + " " * 9) for label, text in rows)


def _first_line(text: str) -> str:
    return _shortened(printable(next(iter(text.strip().splitlines()), "")))


_spellings: list[Callable[[str], str]] = []


def set_spelling(spelling: Callable[[str], str] | None) -> None:
    """Sets the function that rewrites flags and commands in messages as this user would type them; None for none."""
    _spellings[:] = [spelling] if spelling else []


def spelled(text: str) -> str:
    """Returns a message with flags and commands as this user would type them, see `set_spelling`."""
    return _spellings[0](text) if _spellings else text


def printable(text: str) -> str:
    """Returns the text with a question mark in place of each unprintable character except newlines."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def printable_line(text: str) -> str:
    """Returns the text with a question mark in place of each unprintable character and newline."""
    return printable(text).replace("\n", "?")


def quoted(value: str) -> str:
    """Returns a value quoted for a shell, shortened to 120 characters, with `?` for unprintable characters."""
    clean = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff\ue000-\uffff]", "?", value)
    return shlex.quote(clean if len(clean) <= 120 else clean[:117] + "...")


def few(names: Sequence[str], limit: int = 4) -> str:
    """Returns at most `limit` names, separated by commas, and the number of the others."""
    others = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + others


def _shortened(text: str) -> str:
    """Removes the middle of each line that is longer than 600 characters."""
    return "\n".join(line if len(line) <= 600 else f"{line[:300]} ... {line[-200:]}" for line in text.split("\n"))


def similar_names(name: str, valid_names: Iterable[str], count: int = 4, cutoff: float = 0.6) -> list[str]:
    """Returns up to `count` valid names that are similar to a mistyped name, the most similar first."""
    by_lower_case = {candidate.lower(): candidate for candidate in valid_names}
    matches = difflib.get_close_matches(name[:100].lower().replace("-", "_"), by_lower_case, count, cutoff)
    return [by_lower_case[match] for match in matches]


def nearest(name: str, valid_names: Iterable[str]) -> str | None:
    """Returns the valid name that is most similar to `name`, or None if none is similar."""
    return next(iter(similar_names(name, valid_names, 1, cutoff=0.55)), None)


@contextmanager
def as_user_errors(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Converts an error that `user_message` can explain into `CannotStart`, as long as `has_begun()` is false."""
    try:
        yield
    except Exception as error:
        message = user_message(error)
        if not message or isinstance(error, CannotStart) or has_begun():
            raise
        raise CannotStart(f"  {message}") from error


def user_message(error: BaseException) -> str | None:
    """Returns the message of an error that needs no traceback; None for any other error.

    No traceback is needed for `CannotStart` and `RunError`, for ValueError and OSError raised in `data_modules` or
    `lightning_modules` (also in a loader process), for Lightning's `MisconfigurationException`, and for two errors of
    torch that this function explains.
    """
    if isinstance(error, CannotStart | RunError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, RuntimeError) and str(error).startswith("Error(s) in loading state_dict"):
        misfit = str(error).splitlines()[1].strip(" \t.")
        return f"the checkpoint does not fit the model: {misfit}. To start another run, type --name ANOTHER-NAME"
    if isinstance(error, RuntimeError) and "ddp_find_unused_parameters_true" in str(error):
        found = (
            "some parameters did not contribute to the loss of a step, but DistributedDataParallel expects it of all"
        )
        return f"{found}. If this is intended, type --trainer.strategy ddp_find_unused_parameters_true"
    if not isinstance(error, ValueError | OSError):
        return None
    text = str(error)
    if "Original Traceback" in text:  # torch's message for an error in a loader process
        origin = Path(re.findall(r'File "([^"]+)"', text)[-1])
        text = re.findall(r"^[\w.]+: (.*)", text, re.MULTILINE | re.DOTALL)[-1].strip()
    else:
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return text if is_in_package(origin, "data_modules", "lightning_modules") else None


def is_in_package(file: Path, *packages: str) -> bool:
    """Returns whether a file belongs to one of these packages; packages that are not imported do not count."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in packages if name in sys.modules]
    return any(folder in file.parents for folder in folders)


class WrongArgumentError(RequestError, TypeError):
    """An argument of the Trainer that it cannot take; a script can catch a TypeError, as with Lightning."""


class RunError(RuntimeError):
    """Raised when a run that has begun cannot continue; the message states why, so no traceback is printed."""


class SaveError(RunError):
    """Raised on all ranks when a checkpoint cannot be written."""


class TakenOverError(RunError):
    """Raised when a newer attempt at the same run has begun."""


class LeftEarlyError(RuntimeError):
    """Raised when the user's code raised SystemExit or KeyboardInterrupt, at least on this rank."""


class AnotherRankFailed(RuntimeError):  # noqa: N818 - users read this name
    """Raised when another rank failed or did not respond; a failed rank reports the cause itself."""


def mark_reported(error: BaseException) -> None:
    """Marks an error as already reported to the user by another rank."""
    with suppress(AttributeError):
        error.was_reported = True  # type: ignore[attr-defined]


def was_reported(error: BaseException) -> bool:
    """Returns whether another rank has already reported the error to the user."""
    return bool(getattr(error, "was_reported", False))


def mark_refusal(error: BaseException) -> None:
    """Marks an error because of which a run did not begin, if `user_message` explains it."""
    if message := user_message(error):
        with suppress(AttributeError):
            error.is_refusal = True  # type: ignore[attr-defined]
            error._render_traceback_ = CannotStart(f"  {message}")._render_traceback_  # type: ignore[attr-defined]


def as_refusal(error: BaseException) -> BaseException:
    """Returns the `CannotStart` for an error that `mark_refusal` has marked; any other error unchanged."""
    is_marked = getattr(error, "is_refusal", False) and not isinstance(error, CannotStart | RunError)
    return CannotStart(f"  {user_message(error)}") if is_marked else error


def mark_place(error: BaseException, place: str) -> None:
    """Stores in an error what the rank was doing, such as `backward at step 812`."""
    with suppress(AttributeError):
        error.rankzero_place = place  # type: ignore[attr-defined]


def place_of(error: BaseException) -> str:
    """Returns what the rank was doing when the error was raised; empty outside training."""
    return str(getattr(error, "rankzero_place", ""))


def mark_advice(error: BaseException, advice: str) -> None:
    """Stores in an error what the user can do about it."""
    with suppress(AttributeError):
        error.rankzero_advice = advice  # type: ignore[attr-defined]


def advice_of(error: BaseException) -> str:
    """Returns what the user can do about an error whose traceback does not say it; empty if that is unknown."""
    if re.search("device-side assert|CUDA_LAUNCH_BLOCKING", str(error)):
        found = "The line above is where the error of the GPU was noticed; an earlier line may have caused it"
        return f"{found}. With the environment variable CUDA_LAUNCH_BLOCKING=1, the traceback ends at that line"
    return str(getattr(error, "rankzero_advice", ""))


_PEER_FAILURE = re.compile(
    "(?s:(gloo|DistError).*([Cc]onnection (closed|reset|refused)|[Bb]roken pipe|Timed out waiting)"
    "|NCCL.*(remote process exited|operation failed|peer closed|connect to .* (failed|returned)|aborted|tim.{1,4}out))"
)
"""Errors of gloo, of torch's store and of NCCL (torch 2.15, NCCL 2.30) about another rank or the connection to it."""


def is_peer_failure(error: BaseException) -> bool:
    """Returns whether an error is one that a rank raises because another rank failed or exited."""
    if isinstance(error, AnotherRankFailed):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_FAILURE.search(f"{type(error).__mro__} {error}"))


_WRITE_ERRORS = (OSError, ValueError)


def print_error(text: str, prefix: str = "") -> None:
    """Prints an error or a warning on stderr, after the text `prefix`, which is printed unchanged."""
    with suppress(*_WRITE_ERRORS):
        # One write for text and newline: ranks share a pipe, and unbuffered Python writes the newline of `print` later.
        # On a terminal, the escape sequence erases the line, on which another process may have drawn its progress bar.
        line_start = "\r\x1b[2K" if type(sys.stderr) is TextIOWrapper and sys.stderr.isatty() else ""
        print(f"{line_start}{prefix}rankzero: {spelled(text)}\n", end="", file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Prints the progress or the result of a run on stdout."""
    print_text(f"{text}\n")


_quiet: list[bool] = []


def set_quiet(quiet: bool) -> None:
    """Sets whether this process prints only results, warnings and errors (`--quiet`)."""
    _quiet[:] = [True] * quiet


def is_quiet() -> bool:
    """Returns whether this process prints only results, warnings and errors."""
    return bool(_quiet)


def print_notice(text: str) -> None:
    """Prints a line of information that requires no action on stdout, unless `--quiet` is set."""
    if not is_quiet():
        print_line(f"rankzero: {spelled(text)}")


def print_text(text: str) -> None:
    """Prints a text on stdout, without adding a line break; `?` replaces what the encoding of stdout lacks."""
    with suppress(*_WRITE_ERRORS):
        print(encodable(text), end="", flush=True)


def encodable(text: str) -> str:
    """Returns the text with `?` in place of each character that the encoding of stdout lacks."""
    encoding = stdout_encoding()
    return text.encode(encoding, "replace").decode(encoding)


def stdout_encoding() -> str:
    """Returns the encoding of stdout."""
    stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # while rich shows a bar, it replaces stdout
    return getattr(stdout, "encoding", None) or "utf-8"


def flush_streams() -> None:
    """Flushes stdout and stderr, and discards output that cannot be written.

    Must be called last: if Python itself fails to flush at exit, it replaces the exit code by 120.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the shell closed the stream
        try:
            stream.flush()
        except _WRITE_ERRORS:
            with suppress(*_WRITE_ERRORS):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
