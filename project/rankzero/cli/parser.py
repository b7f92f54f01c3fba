"""LightningCLI's parser with error messages in the user's terms."""

import inspect
import re
from argparse import Action
from collections.abc import Callable, Mapping
from enum import Enum
from pydoc import locate
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from rankzero.cli.arguments import Origins
from rankzero.cli.user_classes import classes_named, hidden_file, hidden_file_error, import_failure, missing_class_error
from rankzero.messages import RequestError, few, nearest, quoted, similar_names


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
        actions = self._option_string_actions.items()
        types = {name[2:]: getattr(action, "_typehint", None) for name, action in actions if name.startswith("--")}
        raise parsing_error(message, types, self.origins, ex)


class HelpFormatter(DefaultHelpFormatter):
    """Prints the help of Rankzero's flags, which states their defaults in brackets, without type and default."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        return text if text.endswith("]") else super()._get_help_string(action)


def reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Returns a reader that also accepts values already converted by YAML, such as numbers."""
    return lambda value: read(str(value))


def parsing_error(
    message: str, types: Mapping[str, Any], origins: Origins | None = None, error: Exception | None = None
) -> RequestError:
    """Converts a message of jsonargparse, which has several lines in its own terms, into a `RequestError`."""
    origins = origins or Origins()
    if match := re.match(r"[Uu]nrecognized arguments: -*([^\s=]*)", message):
        return _unknown_name_error(f"--{match[1]}", "there is no such flag", match[1], list(types))
    branch = _first_branch(message)
    key = ".".join(re.findall(r'arser key "([^"]+)"', branch))
    requested, value = origins.request_for(key) if key else "this command line", origins.value_of(key)
    class_paths = re.findall(r"class_path[ =]'([^']+)'", branch)
    class_path = class_paths[-1] if class_paths else value
    owners = reversed(re.findall(r"class_path[ =]'([^']+)'", message))
    hints = [types.get(key), *(_arguments_of(path).get(key.rpartition(".")[2]) for path in owners)]
    hint = next((hint for hint in hints if hint is not None), None)
    if match := re.search(r"(?:Group '([^']+)' does not accept option|[Oo]ption) '([^']+)'", branch):
        return _unknown_argument_error(match[1] or key, match[2], class_path if class_paths else "", types, origins)
    if match := re.search(r"(?:\b(\w+)':\s+)?[^\n]* arguments are required: (.+)", message):
        flags = "".join(f" --{key}.{name} VALUE" if key else f" --{name} VALUE" for name in match[2].split(", "))
        items = re.findall(r"[\w.]+", value) if re.fullmatch(r"\[[\w., ]+\]", value) else []
        lines = [f"--{key}+ {one}{flags * one.endswith(match[1])}" for one in items] or [requested * bool(key) + flags]
        return RequestError(requested, f"required argument missing: {match[2]}", " ".join(lines).strip())
    if file := hidden_file(class_path.rpartition(".")[0]):
        return hidden_file_error(requested, class_path.rpartition(".")[0], file)
    if failure := import_failure(requested, error):
        return failure
    if match := re.search(r"Import path.* does not correspond to a subclass of (\w+)", branch):
        return RequestError(requested, f"{class_path} is not a {match[1]}", f"the class path of a {match[1]}")
    if missing := missing_class_error(requested, key, class_path, *_classes(hint)[:1]):
        return missing
    if class_paths and class_paths[-1] == value:
        others = classes_named(value.rpartition(".")[2])
        line = f"--{key} {others[0] if others else 'package.module.Class, after changing to the folder of package'}"
        return RequestError(requested, _reason(branch), line)
    valid, found = _valid_value(value, hint) if hint else None, _reason(branch)
    if "dot import path string" in found and (classes := _by_similarity(value, [*_public_subclasses(hint)])):
        found = f"there is no class of that name; similar names: {few(classes, 5)}; or a class path"
    if valid is None:
        listed = class_paths[:1] if key.split(".")[0] in ("model", "data") else []
        listing = f"--{key.split('.')[0]}.help {listed[0]}" if listed else "--help_all"
        return RequestError(requested, found, f"{listing}, to see the valid values")
    if file := origins.source_of(key):
        return RequestError(requested, found, f"{key}: {valid}, in {file}")
    flag = requested.split(" ")[0] if requested.startswith(f"--{key}+") else f"--{key}"
    return RequestError(requested, found, f"{flag} {quoted(valid)}")


def _first_branch(message: str) -> str:
    """Returns the lines until the indentation decreases: the errors of a union's first type, and why."""
    lines: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if lines and _indentation(line) < _indentation(lines[-1]):
            break
        lines.append(line)
    return "\n".join(lines)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _reason(branch: str) -> str:
    """Returns the innermost lines, which state why the value is invalid."""
    lines = branch.splitlines() or [""]
    innermost = [line.strip(" -") for line in lines if _indentation(line) == _indentation(lines[-1])]
    found = "\n".join(dict.fromkeys(line for line in innermost if not re.match(r"Expected a (path|.*NoneType)", line)))
    found = re.sub(r"(\. )?Got value: (Namespace|NestedArg)\(.*", "", found)
    found = re.sub(r"typing\.Literal\[([^]]*)\]", r"one of \1", re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", found))
    return found.replace("Expected a ", "expected ") or "the value is not valid"


def _valid_value(value: str, hint: Any) -> str | None:
    """Returns a value that a type accepts and that is similar to a wrong one; None if none was found."""
    choices = [str(one) for part in _parts(hint) if get_origin(part) is Literal for one in get_args(part)]
    candidates = [*_public_subclasses(hint), *choices]
    examples = [f"[{value}]", "1", "0.1", "true", "[1]", "[0.1]"]
    return next((text for text in (*_by_similarity(value, candidates), *examples) if _accepts(hint, text)), None)


def _public_subclasses(hint: Any) -> dict[str, type]:
    """Returns the imported subclasses that a type accepts, by name; none for a type that accepts numbers."""
    bases = [] if {int, float} & set(_parts(hint)) else _classes(hint)
    public = [one for base in bases for one in _subclasses(base) if one.__name__[0] != "_"]
    usable = [one for one in public if not inspect.isabstract(one) and not one.__module__.startswith("rankzero.")]
    return {one.__name__: one for one in usable}


def _classes(hint: Any) -> list[type]:
    return [part for part in _parts(hint) if isinstance(part, type) and part.__module__ != "builtins"]


def _subclasses(base: type) -> list[type]:
    subclasses: list[type] = type.__subclasses__(base)
    return subclasses + [further for subclass in subclasses for further in _subclasses(subclass)]


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
        return similar_names(value, valid, len(valid) or 1, cutoff=0)


def _accepts(hint: Any, text: str) -> bool:
    """Returns whether a type accepts a value, also a class whose required arguments are still missing."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_args([f"--value={text}"])
    except Exception as error:
        return "required" in str(error)
    return True


def _unknown_argument_error(
    group: str, argument: str, class_path: str, types: Mapping[str, Any], origins: Origins
) -> RequestError:
    """Returns the error for an argument that a class does not have, or no longer has."""
    names = [o[len(group) + 1 :] for o in types if o.startswith(f"{group}.")]
    names = list(_arguments_of(class_path)) if class_path else names
    class_name, key = class_path.rpartition(".")[2] or group, f"{group}.{argument}"
    requested = origins.request_for(key)
    if (file := origins.source_of(key)) and file == origins.stored_source:
        found = f"{argument} is no longer an argument of {class_name}; the stored configuration of the run sets it"
        instead = f"{origins.flag_without(key)}, if the result of the run does not depend on it"
        return RequestError(requested, found, instead)
    error = _unknown_name_error(requested, f"{class_name} has no such argument", argument, names, f"{group}.")
    value, best = origins.value_of(key), nearest(argument, names)
    if class_path and not best:
        owners = [one for one in _public_subclasses(types.get(group)).values() if argument in _arguments_of(one)]
        error.instead = (
            _selection(group, argument, "" if file else value, owners[0])
            if owners and locate(class_path) in _classes(types.get(group))
            else f"--{group}.help {class_path}, to list its arguments"
        )
    elif file and best:
        error.instead = f"{group}.{best}: {quoted(value)}, in {file}"
    elif value:
        error.instead += f" {quoted(value)}"
    return error


def _selection(group: str, argument: str, value: str, owner: type) -> str:
    """Returns the flags that select a class of a list, with its required arguments and one more argument."""
    hints = _arguments_of(owner)
    parameters = inspect.signature(owner).parameters.values()
    values = {one.name: "VALUE" for one in parameters if one.default is one.empty and one.name in hints}
    values[argument] = value if _accepts(hints[argument], value) else _valid_value(value, hints[argument]) or "VALUE"
    settings = " ".join(f"--{group}.{name} {quoted(text)}" for name, text in values.items())
    return f"--{group}+ {owner.__name__} {settings}"


def _unknown_name_error(asked: str, found: str, name: str, valid_names: list[str], prefix: str = "") -> RequestError:
    similar, best = similar_names(name, valid_names), nearest(name, valid_names)
    listed = similar if len(valid_names) > 8 else valid_names
    which = "valid" if listed is valid_names else "similar"
    listing = f"; {which} names: {', '.join(f'--{prefix}{name}' for name in listed)}" if listed else ""
    return RequestError(asked, found + listing, f"--{prefix}{best}" if best else "--help_all")


def _arguments_of(class_path: str | type) -> dict[str, Any]:
    """Returns the arguments of a class, including those of its parents, with their types; empty on any error."""
    try:
        parser = ArgumentParser(exit_on_error=False)
        owner: Any = locate(class_path) if isinstance(class_path, str) else class_path
        names = parser.add_class_arguments(owner, fail_untyped=False)
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
