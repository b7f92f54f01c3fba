"""Exit codes, the errors that a message explains, and printing that never raises. Imports no torch."""

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of every command in `launch/`."""

    FINISHED = 0
    FAILED = 1
    WRONG_REQUEST = 2
    """Nothing was started: the message says what was asked, what was found and what to type instead."""
    STOPPED = 75
    """Stopped early at a safe point; the same command carries on."""


TIME_IS_UP = "the end of the time that there is"


class Stopped(SystemExit):
    """The run has stopped, on all ranks: at a safe point and saved, or before it was begun.

    A SystemExit with the code 75, so that a script that does not catch it ends as the command line does.

    Args:
        reason: Why: a signal, or `TIME_IS_UP`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = int(Exit.STOPPED)


class CannotStart(ValueError):  # noqa: N818 - it is what a person reads
    """Nothing was started; the message says why, and what to do.

    Attributes:
        reported_elsewhere: Whether another process tells it; None where nobody has asked, and rank zero tells it.
        local_only: Whether this process alone may have found it, so that rank zero's message does not say it.
    """

    reported_elsewhere: bool | None = None
    local_only = False


class RequestError(CannotStart):
    """A request that cannot be met.

    Args:
        asked: What the person asked for, in their own words: the flag and its value.
        found: What stands against it.
        instead: The line, or the flag, to type instead.
    """

    def __init__(self, asked: str, found: str, instead: str) -> None:
        super().__init__(asked, found, instead)
        self.asked, self.found, self.instead = asked, found, instead

    def __str__(self) -> str:
        """The three lines that a person sees."""
        asked, found, instead = map(spelled, (self.asked, self.found, self.instead))
        rows = (("asked", _readable(asked)), ("found", _readable(found)), ("type", instead))
        return "\n".join(f"  {label:<7}" + printable(text).replace("\n", "\n" + " " * 9) for label, text in rows)


_spellings: list[Callable[[str], str]] = []


def spell_with(spelling: Callable[[str], str] | None) -> None:
    """Chooses how messages spell `--flag value` and `python launch/fit.py`.

    Args:
        spelling: Returns a text as a person would type it here; None leaves texts as they are.
    """
    _spellings[:] = [spelling] if spelling else []


def spelled(text: str) -> str:
    """A text of a message as a person would type it here, see `spell_with`."""
    return _spellings[0](text) if _spellings else text


def printable(text: str) -> str:
    """A text with a question mark in place of each control character."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _readable(text: str) -> str:
    """Without the middle of a line that fills the terminal."""
    return "\n".join(line if len(line) <= 600 else f"{line[:300]} ... {line[-200:]}" for line in text.split("\n"))


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The legal word that `word` was most likely meant to be, or None where nothing is near."""
    by_lower_case = {candidate.lower(): candidate for candidate in legal}
    matches = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.5)
    return by_lower_case[matches[0]] if matches else None


@contextmanager
def as_user_errors(begun: Callable[[], bool]) -> Iterator[None]:
    """Turns a user's mistake into `CannotStart`, as long as training has not begun."""
    try:
        yield
    except CannotStart:
        raise
    except Exception as error:
        message = user_message(error)
        if message and not begun():
            raise CannotStart(f"  {message}") from error
        raise


def user_message(error: BaseException) -> str | None:
    """The message of an error that a message can explain, without a traceback; None for any other.

    That is: what our own modules raise on purpose (ValueError and OSError), in a loader process too, and what Lightning
    calls a misconfiguration.
    """
    if isinstance(error, CannotStart | RunError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, RuntimeError) and str(error).startswith("Error(s) in loading state_dict"):
        return f"the checkpoint does not fit the model: {str(error).splitlines()[1].strip()}"
    if isinstance(error, RuntimeError) and "ddp_find_unused_parameters_true" in str(error):
        return (
            "some parameters were not used in the loss of a step, as DistributedDataParallel expects of all of them. "
            "If that is intended, type --trainer.strategy ddp_find_unused_parameters_true"
        )
    if not isinstance(error, ValueError | OSError):
        return None
    text = str(error)
    if "Original Traceback" in text:  # what torch makes of an error in a loader process
        origin = Path(re.findall(r'File "([^"]+)"', text)[-1])
        text = re.findall(r"^[\w.]+: (.*)", text, re.MULTILINE | re.DOTALL)[-1].strip()
    else:
        origin = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return text if is_of_package(origin, "data_modules", "lightning_modules") else None


def is_of_package(file: Path, *packages: str) -> bool:
    """Whether a file belongs to one of these packages, of those that have been imported."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in packages if name in sys.modules]
    return any(folder in file.parents for folder in folders)


class RunError(RuntimeError):
    """A run that has begun cannot go on, and the message says why: nobody needs a traceback."""


class SaveError(RunError):
    """What has to be saved cannot be."""


class TakenOverError(RunError):
    """Another attempt at the same run has begun."""


class LeftEarlyError(RuntimeError):
    """The user's code has left by sys.exit or KeyboardInterrupt, on this rank at least."""


class AnotherRankFailed(RuntimeError):  # noqa: N818 - it is what a person reads
    """Another rank has failed, and tells why."""


def mark_reported(error: BaseException) -> None:
    """Notes that a person has been told what went wrong, by another rank."""
    with suppress(AttributeError):
        error.was_reported = True  # type: ignore[attr-defined]


def was_reported(error: BaseException) -> bool:
    """Whether another rank has told a person what went wrong."""
    return bool(getattr(error, "was_reported", False))


def lost_contact(error: BaseException) -> bool:
    """Whether this is what a rank gets to see when another one has failed."""
    said = r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process exited|Timed out waiting"
    if isinstance(error, AnotherRankFailed):
        return True
    return isinstance(error, RuntimeError) and bool(re.search(said, str(error)))


_LOST = (OSError, ValueError)


def print_error(text: str, above: str = "") -> None:
    """Prints a line on stderr: what goes wrong or is about to end. `above` goes before it, as it is."""
    with contextlib.suppress(*_LOST):
        # Text and newline in one write: ranks share a pipe, and unbuffered Python writes print's newline separately.
        print(f"{above}rankzero: {spelled(text)}\n", end="", file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Prints on stdout: how a run goes, and what came of it."""
    with contextlib.suppress(*_LOST):
        print(f"{text}\n", end="", flush=True)


def flush_streams() -> None:
    """To be called last: what could not be written would make an exit code of its own of it."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where a shell has closed it
        try:
            stream.flush()
        except _LOST:
            with contextlib.suppress(*_LOST):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
