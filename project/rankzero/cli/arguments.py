"""Parses a command line and its config files as far as possible without importing torch.

`--help` and mistyped flags are answered at once, also on a login node. The rest is translated for LightningCLI.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from rankzero.cli.command import LIGHTNING_KEYS, OTHER_SUBCOMMANDS, SUBCOMMANDS, Command
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.validate import requested_world
from rankzero.messages import RequestError, nearest, print_line, quoted
from rankzero.runs.directory import expanded
from rankzero.runs.stored_config import flattened


def read_config(
    command: Command, path: str, classes: Mapping[str, str | None] = {}
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Reads a config file.

    `classes` has the model and the data module that flags name; a section without a class has their arguments.

    Returns:
        The value for LightningCLI's `--config`, which is the path, or translated YAML text if the file has short names;
        its content, with short names translated; and the values in it, by LightningCLI key or by Rankzero's flag.

    Raises:
        RequestError: The file does not exist, is not YAML, or has an unknown key.
    """
    content = _load(path)
    translated = {}
    for name, value in content.items():
        if name not in command.keys and name not in LIGHTNING_KEYS:
            if value is None:  # such as `weights_only`, which every LightningCLI writes
                continue
            raise command.unknown_flag_error(str(name), path, None if isinstance(value, dict | list) else str(value))
        translated[name] = value
        if name in ("model", "data"):
            if isinstance(value, dict) and value and not value.keys() & {"class_path", "init_args"}:
                value = {"class_path": classes.get(name), "init_args": value}
                if value["class_path"] is None:
                    asked, found = f"{name} in --config {path}", "it has the arguments of a class, but names no class"
                    raise RequestError(asked, found, f"--{name} MODULE.CLASS --config {path}")
            translated[name] = _with_class_path(command, name, value)
    for flag in command.flags:
        for name in {flag.name, *flag.aliases} & translated.keys():
            if (value := translated.pop(name)) is not None:
                try:
                    _put(translated, flag.lightning_key or flag.name, flag.value(str(value)))
                except RequestError as error:
                    example, end = error.instead.removeprefix(f"--{flag.name} "), f", in --config {path}"
                    raise RequestError(f"{name}: {value}{end}", error.found, f"{name}: {example}{end}") from None
    content_by_key = flattened(translated) | {name: translated.get(name) for name in ("model", "data")}
    keys = [*(flag.lightning_key or flag.name for flag in command.flags), "model", "data"]
    values = {key: value for key in keys if (value := content_by_key.get(key)) is not None}
    return path if translated == content else yaml.safe_dump(translated, sort_keys=False), translated, values


class _Loader(yaml.SafeLoader):
    """YAML loader that keeps `30:00` as text, because it is a time; YAML 1.1 converts it to the number 1,800."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:int"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$"), list("-+0123456789")
)


def _load(path: str, flag: str = "config") -> dict[str, Any]:
    file = expanded(path)
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path()
        names = sorted(entry.name for entry in folder.glob("[!.]*") if entry.suffix in (".yaml", ".yml", ".json"))
        by_stem = {Path(name).stem: name for name in names}  # all names are similar in their suffix
        suggestion = by_stem.get(nearest(file.stem, by_stem) or "")
        found = f"there is no such file; {folder.resolve()} contains {', '.join(names) or 'no .yaml file'}"
        instead = f"--{flag} {folder / suggestion}" if suggestion else f"--{flag} FILE, or omit it"
        raise RequestError(f"--{flag} {path}", found, instead)
    return _parsed(file, f"--{flag} {path}")


def _parsed(source: str | Path, requested: str) -> dict[str, Any]:
    """Returns the dict in a config file (`Path`) or in YAML text."""
    try:
        content = yaml.load(source if isinstance(source, str) else source.read_text(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RequestError(requested, f"it is not YAML: {error}", "--print_config, to see an example") from None
    if not isinstance(content, dict):
        raise RequestError(requested, "it has no 'key: value' lines", "--print_config prints an example")
    return content


def _with_class_path(command: Command, name: str, section: Any) -> Any:
    """Replaces the short name in `model: ResNet` or `class_path: ResNet` by the class path."""
    short_name = section.get("class_path") if isinstance(section, dict) else section
    if not isinstance(short_name, str):
        return section
    return {**(section if isinstance(section, dict) else {}), "class_path": command.class_path(name, short_name)}


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    content[section or name] = {**(content.get(section) or {}), name: value} if section else value


class Origins(NamedTuple):
    """Names the source of a value as the user typed it.

    Args:
        typed_arguments: The command line as typed.
        keys: Short flag or alias -> LightningCLI key, or the flag's name if it has none.
        sources: Further sources such as `--config FILE`, each with its content; later sources override earlier ones.
        stored_source: Name in `sources` of the configuration stored in a checkpoint; empty without one.
    """

    typed_arguments: Sequence[str] = ()
    keys: Mapping[str, str] = {}
    sources: Sequence[tuple[str, Mapping[str, Any]]] = ()
    stored_source: str = ""

    def request_for(self, key: str) -> str:
        """Returns the request that set a value: the flag and value as typed, or the key, the value and the file."""
        options = list(self._options())
        same = [text for option, text, _ in options if self.keys.get(option, option).removesuffix(".class_path") == key]
        if same:
            return same[-1]
        if name := self.source_of(key):
            value = self.value_of(key)
            return f"{key}{f': {quoted(value)}' if value else ''}, in {name}"
        sections = [(option, text) for option, text, _ in options if f"{key}.".startswith(f"{option}.")]
        return str(max(sections, key=lambda option: len(option[0]))[1]) if sections else f"--{key}"

    def value_of(self, key: str) -> str:
        """Returns a value as it was typed or as text; empty if neither the command line nor a file sets it."""
        keys = (key, f"{key}.class_path")
        typed = [value for option, _, value in self._options() if self.keys.get(option, option) in keys]
        if typed or not (name := self.source_of(key)):
            return typed[-1] if typed else ""
        content = flattened(dict(self.sources)[name])
        given = content.get(key, content.get(f"{key}.class_path"))
        return "" if given is None else str(given)

    def source_of(self, key: str) -> str:
        """Returns the file or checkpoint that sets a value; empty if none does, or if the value was typed."""
        if any(self.keys.get(option, option) == key for option, *_ in self._options()):
            return ""
        for name, content in reversed(self.sources):
            if any(path == key or path.startswith(f"{key}.") for path in flattened(content)):
                return str(name)
        return ""

    def flag_without(self, key: str) -> str:
        """Returns the flag that passes a section of the stored configuration without the argument `key`."""
        section, _, argument = key.partition(".")
        content = dict(self.sources)[self.stored_source][section]
        init_args = {name: value for name, value in (content.get("init_args") or {}).items() if name != argument}
        text = json.dumps({"class_path": content["class_path"], "init_args": init_args})
        return f"--{section} '{text}'"

    def _options(self) -> Iterator[tuple[str, str, str]]:
        """Yields each typed flag without dashes, its text with the value, and the value."""
        for i, token in enumerate(self.typed_arguments):
            if token.startswith("--"):
                option, equals, value = token[2:].partition("=")
                next_tokens = self.typed_arguments[i + 1 : i + 2]
                if not equals and next_tokens and not next_tokens[0].startswith("--"):
                    value, equals = next_tokens[0], " "
                yield option.removesuffix("+"), f"--{option}" + (f" {quoted(value)}" if equals else ""), value


class Arguments(NamedTuple):
    """A parsed command line: the values of Rankzero's flags, and the command line for LightningCLI.

    Args:
        command: The command to run.
        values: LightningCLI key or Rankzero's flag -> given value; the command line overrides config files.
        explicitly_set: The names among `model` and `data` that a flag or a config file sets.
        explain: Whether `--explain` was given.
        arguments: The command line for LightningCLI.
        origins: The source of each value.
    """

    command: Command
    values: Mapping[str, Any]
    explicitly_set: frozenset[str] = frozenset()
    explain: bool = False
    arguments: Sequence[str] = ()
    origins: Origins = Origins()

    @property
    def only_prints(self) -> bool:
        """Whether the command only prints a config file or help."""
        return any(re.match(r"--(help|print_config|\w+\.help)\b", token) for token in self.arguments)

    @property
    def requested_world(self) -> RequestedWorld:
        own_values = {flag.name: self.get(flag.name) for flag in self.command.own_flags}
        keys = [key for key in self.values if key.startswith("trainer.")]
        return requested_world(own_values, {key.removeprefix("trainer."): self.values[key] for key in keys})

    def get(self, name: str) -> Any:
        """Returns the given value of a short flag, or its default."""
        flag = next(flag for flag in self.command.flags if flag.name == name)
        return self.values.get(flag.lightning_key or flag.name, flag.default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if match := re.match(r"argument (--[^\s/]+)\S*: expected (?:at least )?one argument", message):
            raise RequestError(match[1], "it has no value", f"{match[1]} VALUE")
        raise RequestError(" ".join(sys.argv[1:]), message, "--help")


def parse_arguments(command: Command, arguments: Sequence[str]) -> Arguments:
    """Parses a command line; prints the help and exits if it is requested.

    Raises:
        RequestError: A flag, a model, a data module or a config file does not exist, or a value is invalid.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--help_all", action="store_true")
    parser.add_argument("--explain", action="store_true")
    # torch.distributed.launch adds this flag, which is ignored: LOCAL_RANK has the same value.
    parser.add_argument("--local-rank", "--local_rank")
    parser.add_argument("-c", "--config", action="append", default=[])
    for name in ("model", "data"):
        parser.add_argument(f"--{name}")
    for flag in command.flags:
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        optional_value: dict[str, Any] = {"nargs": "?", "const": flag.bare_value} if flag.bare_value is not None else {}
        parser.add_argument(*names, dest=flag.name, **optional_value)
    parsed, rest = parser.parse_known_args(list(arguments))
    if parsed.help:
        print_line(command.help())
        sys.exit(0)
    model = (command.default_model or "") if parsed.model is None else parsed.model
    _reject_unknown(command, rest, arguments[0] if arguments else "", model if model in command.models.__all__ else "")

    values: dict[str, Any] = {}
    lightning_arguments: list[str] = []
    sources: list[tuple[str, dict[str, Any]]] = []
    for path in parsed.config:
        text, content, file_values = read_config(command, path, {"model": parsed.model, "data": parsed.data})
        sources.append((f"--config {path}", content))
        values.update(file_values)
        lightning_arguments.append(f"--config={text}")
    values.update(_lightning_values(command, rest))
    chosen = {name: getattr(parsed, name) for name in ("model", "data") if getattr(parsed, name) is not None}
    in_config = {name for name in ("model", "data") if values.pop(name, None) is not None}
    by_path = {name for name in ("model", "data") if any(token.startswith(f"--{name}.class_path") for token in rest)}
    explicitly_set = {*chosen, *in_config, *by_path}
    for name, default in (("model", command.default_model), ("data", command.default_data)):
        if default and name not in explicitly_set:
            chosen[name] = default
    lightning_arguments += [f"--{name}={command.class_path(name, text)}" for name, text in chosen.items()]
    lightning_arguments += _with_class_paths(command, rest)
    for flag in command.flags:
        if (text := getattr(parsed, flag.name)) is not None:
            value = flag.value(text)
            values[flag.lightning_key or flag.name] = value
            lightning_arguments.append(f"--{flag.lightning_key or flag.name}={value}")
    if parsed.help_all:
        lightning_arguments = ["--help"]
    origins = Origins(list(arguments), command.keys, sources)
    return Arguments(command, values, frozenset(explicitly_set), parsed.explain, lightning_arguments, origins)


def _with_class_paths(command: Command, rest: Sequence[str]) -> list[str]:
    """Replaces a short name after `--model.help` or `--data.help` by its class path."""
    tokens = list(rest)
    for i, token in enumerate(tokens[:-1]):
        if token in ("--model.help", "--data.help") and not tokens[i + 1].startswith("-"):
            tokens[i + 1] = command.class_path(token.strip("-").split(".")[0], tokens[i + 1])
    return tokens


def _reject_unknown(command: Command, rest: Sequence[str], first_argument: str, model: str) -> None:
    """Rejects arguments that neither Rankzero nor LightningCLI knows, before torch is imported."""
    for i, token in enumerate(rest):
        if token.startswith("-") and not re.match(r"-[0-9.]", token):
            name, equals, text = token.lstrip("-").partition("=")
            if name.split(".")[0] not in (*LIGHTNING_KEYS, "print_config"):
                next_value = next((value for value in rest[i + 1 : i + 2] if not value.startswith("--")), None)
                raise command.unknown_flag_error(name, "", text if equals else next_value, model)
        elif i == 0 or not rest[i - 1].startswith("--") or "=" in rest[i - 1]:
            raise _unexpected_argument(command, token, token == first_argument)


def _unexpected_argument(command: Command, argument: str, is_first: bool) -> RequestError:
    """Returns the error for an unexpected argument, such as a mistyped subcommand or a subcommand after a flag."""
    script = f"python launch/{command.name}.py"
    if argument in SUBCOMMANDS:
        return RequestError(argument, "the subcommand must come before the flags", f"{script} {argument} ...")
    found, subcommand = "unexpected argument, which is neither a flag nor the value of one", None
    if is_first:
        found = f"unexpected argument; the subcommands are {', '.join(SUBCOMMANDS)}"
        subcommand = nearest(argument[:100], [*SUBCOMMANDS, *OTHER_SUBCOMMANDS])
    line = f"{script} {OTHER_SUBCOMMANDS.get(subcommand, subcommand)} ..." if subcommand else f"{script} --help"
    return RequestError(quoted(argument), found, line)


def _lightning_values(command: Command, rest: Sequence[str]) -> dict[str, Any]:
    """Returns the values of flags given by LightningCLI key: `--trainer.devices 2`, `--trainer FILE.yaml`."""
    keys = {flag.lightning_key for flag in command.flags if flag.lightning_key}
    values = {}
    for i, token in enumerate(rest):
        if not token.startswith("--"):
            continue
        name, equals, text = token.removeprefix("--").partition("=")
        text = text if equals else "".join(rest[i + 1 : i + 2])
        if name in keys:
            values[name] = yaml.safe_load(text)
        elif name == "trainer":
            is_yaml = text.lstrip().startswith("{")  # otherwise, the path of a file
            content = _parsed(text, f"--trainer {text}") if is_yaml else _load(text, "trainer")
            section = {f"trainer.{key}": value for key, value in content.items()}
            values.update({key: section[key] for key in keys & section.keys()})
    return values
