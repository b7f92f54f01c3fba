"""LightningCLI's parser with error messages in the user's terms."""

import inspect
import re
from argparse import Action
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from enum import Enum
from pydoc import locate
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rankzero.cli.class_errors import hidden_file_error, import_failure, missing_class_error, wrong_class_error
from rankzero.cli.foreign_flags import quoted, similar_names
from rankzero.cli.import_names import hidden_file
from rankzero.cli.origins import Origins
from rankzero.messages import RequestError, few, nearest


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
        types = {
            option[2:]: getattr(action, "_typehint", None)
            for option, action in self._option_string_actions.items()
            if option.startswith("--")
        }
        raise parsing_error(message, types, self.origins, ex)


class HelpFormatter(DefaultHelpFormatter):
    """Prints the help of Rankzero's flags, which states their defaults in brackets, without type and default."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        return text if text.endswith("]") else super()._get_help_string(action)


def reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Returns a reader that also accepts values already converted by YAML, such as numbers."""

    def read_any(value: Any) -> Any:
        return read(str(value))

    return read_any


def parsing_error(
    message: str, types: Mapping[str, Any], origins: Origins | None = None, error: Exception | None = None
) -> RequestError:
    """Converts a message of jsonargparse, which has several lines in its own terms, into a `RequestError`.

    Args:
        message: The message of jsonargparse.
        types: Existing option, without dashes -> its type.
        origins: The source of each value.
        error: The exception that the message describes.
    """
    origins, options = origins or Origins(), list(types)
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
        name = match[1].split("=")[0]
        return _unknown_name_error(name, "there is no such flag", [f"--{option}" for option in options])
    names = re.findall(r'[Pp]arser key "([^"]+)"', message)
    class_paths = re.findall(r"Problem with given class_path '([^']+)'", message)
    # A union of a class and a list of it reports an error twice.
    key = ".".join(names if len(set(class_paths)) == len(class_paths) else dict.fromkeys(names))
    class_path = match[1] if (match := re.search(r"class_path '([^']+)'", message)) else ""
    given_value = (class_path if "." not in key else "") or (re.findall(r"Given value: (.*)", message) or [""])[-1]
    given_value = re.sub(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", r"\1", given_value)
    requested = origins.request_for(key, given_value) if key else "this command line"
    if match := re.search(r"(?:Group '([^']+)' does not accept option|[Oo]ption) '([^']+)'", message):
        class_paths = re.findall(r"is not accepted.*class_path='([^']+)'", message)
        return _unknown_argument_error(
            match[1] or key, match[2], class_paths[-1] if class_paths else class_path, options, origins
        )
    if match := re.search(r"arguments are required: (.+)", message):
        names = match[1].split(", ")
        if key in ("model", "data") and not class_path:
            requested = f"--{key}"
        return RequestError(
            requested,
            f"required argument missing: {match[1]}",
            " ".join(f"--{key}.{name} ..." if key else f"--{name} ..." for name in names),
        )
    if file := hidden_file(class_path.rpartition(".")[0]):
        return hidden_file_error(requested, class_path.rpartition(".")[0], file)
    if failure := import_failure(requested, error):
        return failure
    if match := re.search(r"Import path.* does not correspond to a subclass of (\w+)", message):
        return wrong_class_error(requested, class_path or given_value, match[1])
    if missing := missing_class_error(requested, key, class_path or given_value):
        return missing
    if match := re.search(r"Problem with given class_path '[^']+':\s*(?!\s|Parser key)(.+)", message):
        return RequestError(
            requested, match[1], f"--{key} package.module.Class, after changing to the folder that contains package"
        )
    return _invalid_value_error(message, key, requested, types, origins)


def _invalid_value_error(
    message: str, key: str, requested: str, types: Mapping[str, Any], origins: Origins
) -> RequestError:
    """Returns the error for a value that its argument does not accept, with a value that it accepts."""
    class_paths = re.findall(r"class_path[ =]'([^']+)'", message)
    hints = [types.get(key), *(_arguments_of(path).get(key.rpartition(".")[2]) for path in reversed(class_paths))]
    hint = next((hint for hint in hints if hint is not None), None)
    value = (re.findall(r"(?:path string|(?:Got|Given) value): (.+?)\.?(?:$| Got)", message, re.M) or [""])[0]
    classes = _by_similarity(value, _class_names(hint))
    found = _reason(message)
    if classes and f"path string: {value}" in message:
        found = f"there is no class of that name; similar names: {few(classes, 5)}; or a class path"
    examples = [f"[{value}]", "1", "0.1", "true", "[1]", "[0.1]"]
    candidates = [*classes, *_by_similarity(value, _choices(hint)), *examples]
    valid = next((text for text in candidates if _accepts(hint, text)), None) if hint else None
    if valid is None:
        listed = class_paths[:1] if key.split(".")[0] in ("model", "data") else []
        listing = f"--{key.split('.')[0]}.help {listed[0]}" if listed else "--help_all"
        return RequestError(requested, found, f"{listing}, to see the valid values")
    if file := origins.source_of(key):
        return RequestError(requested, found, f"{key}: {valid}, in {file}")
    flag = requested.split(" ")[0] if requested.startswith(f"--{key}+") else f"--{key}"
    return RequestError(requested, found, f"{flag} {quoted(valid)}")


def _class_names(hint: Any) -> list[str]:
    """Returns the names of the imported subclasses that a type accepts; none for a type that accepts numbers."""
    bases = [part for part in _parts(hint) if isinstance(part, type)]
    if {int, float} & set(bases):
        return []
    classes = [one for base in bases if base.__module__ != "builtins" for one in _subclasses(base)]
    public = [one for one in classes if one.__name__[0] != "_" and not one.__module__.startswith("rankzero.")]
    return sorted({one.__name__ for one in public if not inspect.isabstract(one)})


def _subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(base)
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _choices(hint: Any) -> list[str]:
    return [str(value) for part in _parts(hint) if get_origin(part) is Literal for value in get_args(part)]


def _parts(hint: Any) -> list[Any]:
    """Returns the types in a union or list, and the returned type of a callable."""
    arguments = () if get_origin(hint) is Literal else get_args(hint)
    arguments = arguments[-1:] if get_origin(hint) is Callable else arguments
    return [part for argument in arguments for part in _parts(argument)] if arguments else [hint]


def _by_similarity(value: str, valid: list[str]) -> list[str]:
    """Returns valid values, the most similar first; of numbers, the nearest."""
    try:
        return sorted(valid, key=lambda text: abs(float(text) - float(value)))
    except ValueError:
        compared = SequenceMatcher(b=value.lower())

        def difference(text: str) -> float:
            compared.set_seq1(text.lower())
            return -compared.ratio()

        return sorted(valid, key=difference)


def _accepts(hint: Any, text: str) -> bool:
    """Returns whether a type accepts a value, also a class whose required arguments are still missing."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_args([f"--value={text}"])
    except Exception as error:
        return "required" in str(error)
    return True


def _reason(message: str) -> str:
    """Returns the lines of a message that state why the value is invalid."""
    irrelevant = (
        r"Parser key|Problem with|Does not|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path"
    )
    message = re.sub(r"Type \S.* expects a function or a callable class: ", "", message)
    message = re.sub(r"(\. )?Got value: (Namespace|NestedArg)\(.*", "", message)
    lines = [line.strip(" -") for line in message.splitlines() if "Namespace(" not in line]
    relevant = [line for line in lines if line and not re.match(irrelevant, line)]
    found = "\n".join(dict.fromkeys(relevant)) or "the value is not valid"
    found = re.sub(r"typing\.Literal\[([^]]*)\]", r"one of \1", re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", found))
    return found.replace("Expected a ", "expected ")


def _unknown_argument_error(
    group: str, argument: str, class_path: str, options: list[str], origins: Origins
) -> RequestError:
    """Returns the error for an argument that a class does not have, or no longer has."""
    valid_names = list(_arguments_of(class_path)) or [
        o.removeprefix(f"{group}.") for o in options if o.startswith(f"{group}.")
    ]
    class_name = class_path.rpartition(".")[2] or group
    if argument in valid_names:
        return RequestError(origins.request_for(group), f"it is not a valid {argument} of {class_name}", "--help_all")
    key = f"{group}.{argument}"
    file = origins.source_of(key)
    if file and file == origins.stored_source:
        found = f"{argument} is no longer an argument of {class_name}; the stored configuration of the run sets it"
        return RequestError(
            origins.request_for(key),
            found,
            f"{origins.flag_without(key)}, if the result of the run does not depend on it",
        )
    error = _unknown_name_error(
        f"--{key}", f"{class_name} has no such argument", [f"--{group}.{name}" for name in valid_names]
    )
    typed = origins.request_for(key)
    value = typed.removeprefix(error.asked) if typed.startswith(f"{error.asked} ") else ""
    instead = error.instead + value * error.instead.startswith(f"--{group}.")
    if class_path and not nearest(argument, valid_names):  # the names above are similar only in their prefix
        instead = f"--{group}.help {class_path}, to list its arguments"
    return RequestError(typed if file or value else error.asked, error.found, instead)


def _unknown_name_error(requested: str, found: str, valid_names: list[str]) -> RequestError:
    similar = similar_names(requested, valid_names)
    listed = similar if len(valid_names) > 8 else valid_names
    listing = f"; {'valid' if listed is valid_names else 'similar'} names: {', '.join(listed)}" if listed else ""
    return RequestError(
        requested, found + listing, similar[0] if similar else nearest(requested, valid_names) or "--help_all"
    )


def _arguments_of(class_path: str) -> dict[str, Any]:
    """Returns the arguments of a class, including those of its parents, with their types; empty on any error."""
    try:
        parser = ArgumentParser(exit_on_error=False)
        names = parser.add_class_arguments(locate(class_path), fail_untyped=False)
        return {name: getattr(parser._option_string_actions[f"--{name}"], "_typehint", None) for name in names}
    except Exception:  # the caller reports another error; the arguments are optional
        return {}


def without_enums(value: Any) -> Any:
    """Returns a configuration with members of string enumerations replaced by their values.

    jsonargparse (4.53) cannot dump such a default if the annotation is `str`, as in Lightning's Timer.
    """
    if isinstance(value, Namespace):
        return Namespace(**{key: without_enums(item) for key, item in vars(value).items()})
    if isinstance(value, dict):
        return {key: without_enums(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_enums, value))
    return value.value if isinstance(value, Enum) and isinstance(value, str) else value
