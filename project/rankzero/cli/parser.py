"""LightningCLI's parser with error messages in the user's terms."""

import re
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rankzero.cli.foreign_flags import near_names
from rankzero.cli.import_failure import hidden, import_failure, not_a
from rankzero.cli.import_names import hidden_file
from rankzero.cli.origins import Origins
from rankzero.messages import RequestError, nearest


class RankzeroParser(LightningArgumentParser):
    """Lightning's parser; it raises a `RequestError` and does not print the usage."""

    origins: Origins = Origins()
    """The source of each value."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a nested parser; the error of the outer parser includes this one
            super().error(message, ex)
        cause: BaseException | None = ex
        while cause is not None:  # errors in a config file are wrapped, because a separate parser reads it
            if isinstance(cause, RequestError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        options = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        raise parsing_error(message, options, self.origins, ex)


def reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Returns a reader that also accepts values already converted by YAML, such as numbers."""

    def read_any(value: Any) -> Any:
        return read(str(value))

    return read_any


def parsing_error(
    message: str, options: list[str], origins: Origins | None = None, error: Exception | None = None
) -> RequestError:
    """Converts a message of jsonargparse, which has several lines in its own terms, into a `RequestError`.

    Args:
        message: The message of jsonargparse.
        options: The existing options, without dashes.
        origins: The source of each value.
        error: The exception that the message describes.
    """
    origins = origins or Origins()
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
        name = match[1].split("=")[0]
        return _no_such(name, "there is no such flag", [f"--{option}" for option in options])
    key = ".".join(re.findall(r'[Pp]arser key "([^"]+)"', message))
    class_path = match[1] if (match := re.search(r"class_path '([^']+)'", message)) else ""
    given = (class_path if "." not in key else "") or (re.findall(r"Given value: (.*)", message) or [""])[-1]
    given = re.sub(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", r"\1", given)
    asked = origins.asked(key, given) if key else "this command line"
    if match := re.search(r"(?:Group '([^']+)' does not accept option|[Oo]ption) '([^']+)'", message):
        inner = re.findall(r"is not accepted.*class_path='([^']+)'", message)
        return _no_such_argument(match[1] or key, match[2], inner[-1] if inner else class_path, options, origins)
    if match := re.search(r"arguments are required: (.+)", message):
        names = match[1].split(", ")
        if key in ("model", "data") and not class_path:
            asked = f"--{key}"
        return RequestError(
            asked, f"required argument missing: {match[1]}", " ".join(f"--{key}.{name} ..." for name in names)
        )
    if file := hidden_file(class_path.rpartition(".")[0]):
        return hidden(asked, class_path.rpartition(".")[0], file)
    if failure := import_failure(asked, error):
        return failure
    if match := re.search(r"Import path.* does not correspond to a subclass of (\w+)", message):
        return not_a(asked, class_path or given, match[1])
    if match := re.search(r"Problem with given class_path '[^']+':\s*(?!\s|Parser key)(.+)", message):
        return RequestError(asked, match[1], f"--{key} package.module.Class, from the folder that package is in")
    return RequestError(asked, _readable(message), "--help_all to see what it may be")


def _readable(message: str) -> str:
    """Returns the lines of a message that state why the value is invalid."""
    noise = (
        r"Parser key|Problem with|Does not|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path"
    )
    message = re.sub(r"Type \S.* expects a function or a callable class: ", "", message)
    message = re.sub(r"(\. )?Got value: (Namespace|NestedArg)\(.*", "", message)
    lines = [line.strip(" -") for line in message.splitlines() if "Namespace(" not in line]
    kept = [line for line in lines if line and not re.match(noise, line)]
    found = "\n".join(dict.fromkeys(kept)) or "a value that it cannot take"
    found = re.sub(r"typing\.Literal\[([^]]*)\]", r"one of \1", re.sub(r"<class '(\w+)'>", r"\1", found))
    return found.replace("Expected a ", "expected ")


def _no_such_argument(group: str, argument: str, class_path: str, options: list[str], origins: Origins) -> RequestError:
    """Returns the error for an argument that a class does not have, or no longer has."""
    known = _arguments_of(class_path) or [o.removeprefix(f"{group}.") for o in options if o.startswith(f"{group}.")]
    takes = class_path.rpartition(".")[2] or group
    if argument in known:
        return RequestError(origins.asked(group), f"no value that {takes} takes for {argument}", "--help_all")
    key = f"{group}.{argument}"
    file = origins.file_of(key)
    if file and file == origins.stored:
        found = f"{argument} is no longer an argument of {takes}; the stored configuration of the run sets it"
        return RequestError(
            origins.asked(key), found, f"{origins.without(key)}, where its result does not depend on it"
        )
    error = _no_such(f"--{key}", f"{takes} has no such argument", [f"--{group}.{name}" for name in known])
    return RequestError(origins.asked(key) if file else error.asked, error.found, error.instead)


def _no_such(asked: str, found: str, known: list[str]) -> RequestError:
    near = near_names(asked, known)
    listed = near if len(known) > 8 else known
    listing = f"; there {'are' if listed is known else 'are, among others,'} {', '.join(listed)}" if listed else ""
    return RequestError(asked, found + listing, near[0] if near else nearest(asked, known) or "--help_all")


def _arguments_of(class_path: str) -> list[str]:
    """Returns the arguments of a class, including arguments that it passes to its parents; empty on any error."""
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
        return list(ArgumentParser(exit_on_error=False).add_class_arguments(kind, fail_untyped=False))
    except Exception:  # the caller reports another error; this list is optional
        return []


def without_enums(value: Any) -> Any:
    """Returns a configuration with members of string enumerations replaced by their values.

    jsonargparse (4.53) cannot dump such a default if the annotation is `str`, as in Lightning's Timer.
    """
    if isinstance(value, Namespace):
        return Namespace(**{key: without_enums(one) for key, one in vars(value).items()})
    if isinstance(value, dict):
        return {key: without_enums(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_enums, value))
    return value.value if isinstance(value, Enum) and isinstance(value, str) else value
