"""LightningCLI's parser, with mistakes told in a person's terms."""

import re
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from project.errors import RequestError, nearest


class RankzeroParser(LightningArgumentParser):
    """Lightning's parser; a mistake is a `RequestError`, not a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within the parser, whose error becomes part of the outer one's
            super().error(message, ex)
        while ex is not None:  # what a config file says is read by a parser of its own, whose error comes wrapped
            if isinstance(ex, RequestError):
                raise ex
            ex = ex.__cause__ or ex.__context__  # type: ignore[assignment]
        raise parsing_error(message, [option[2:] for option in self._option_string_actions if option.startswith("--")])


def reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Lets the reader of a flag read what YAML has made a number of already."""

    def read_any(value: Any) -> Any:
        return read(str(value))

    return read_any


def parsing_error(message: str, options: list[str]) -> RequestError:
    """Makes one message of what jsonargparse says, which is several lines in terms of its own.

    Args:
        message: What it says.
        options: The options that there are, without dashes.
    """
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
        name = match[1].split("=")[0]
        return _no_such(name, "there is no such flag", [f"--{option}" for option in options])
    key = ".".join(re.findall(r'[Pp]arser key "([^"]+)"', message))
    class_path = match[1] if (match := re.search(r"class_path '([^']+)'", message)) else ""
    given = (class_path if "." not in key else "") or (re.findall(r"Given value: (.*)", message) or [""])[-1]
    given = re.sub(r"NestedArg\(key='.*', val='(.*)'\)", r"\1", given)
    asked = f"--{key} {given}".strip() if key else "this command line"
    if match := re.search(r"(?:Group '([^']+)' does not accept option|[Oo]ption) '([^']+)'", message):
        group = match[1] or key
        known = _arguments_of(class_path) or [o.removeprefix(f"{group}.") for o in options if o.startswith(f"{group}.")]
        whose = class_path.rpartition(".")[2] or group
        dashes = f"--{group}."
        return _no_such(f"{dashes}{match[2]}", f"{whose} has no such argument", [dashes + name for name in known])
    if match := re.search(r"arguments are required: (.+)", message):
        return RequestError(
            asked, f"it has to be told {match[1]}", " ".join(f"--{key}.{n} ..." for n in match[1].split(", "))
        )
    if match := re.search(r"Problem with given class_path '[^']+':\s*(?!\s|Parser key)(.+)", message):
        return RequestError(asked, match[1], f"--{key} package.module.Class, from the folder that package is in")
    noise = (
        r"Parser key|Problem with|Does not|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path"
    )
    lines = [line.strip(" -") for line in message.splitlines()]
    found = "\n".join(line for line in lines if line and not re.match(noise, line)) or message
    found = re.sub(r"typing\.Literal\[([^]]*)\]", r"one of \1", re.sub(r"<class '(\w+)'>", r"\1", found))
    return RequestError(asked, found.replace("Expected a ", "expected "), "--help_all to see what it may be")


def _no_such(asked: str, found: str, known: list[str]) -> RequestError:
    near = nearest(asked, known)
    listed = f"; there are {', '.join(known)}" if len(known) <= 20 else ""
    return RequestError(asked, found + listed, near or "--help_all to see all there are")


def _arguments_of(class_path: str) -> list[str]:
    """The arguments of a class, those that it passes on to its parents included."""
    module, _, name = class_path.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
        return list(ArgumentParser(exit_on_error=False).add_class_arguments(kind, fail_untyped=False))
    except Exception:  # whatever is wrong with it, the message is about something else
        return []


def without_enums(value: Any) -> Any:
    """A configuration in which members of enumerations are their values.

    jsonargparse (4.53) cannot write the defaults of such a type where the annotation is `str`, as of Lightning's Timer.
    """
    if isinstance(value, Namespace):
        return Namespace(**{key: without_enums(one) for key, one in vars(value).items()})
    if isinstance(value, dict):
        return {key: without_enums(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_enums, value))
    return value.value if isinstance(value, Enum) and isinstance(value, str) else value
