"""Config files, and the source of each value: the command line or a file. Does not import torch."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rankzero.cli.command import LIGHTNING_KEYS, Command
from rankzero.messages import RequestError, nearest, quoted
from rankzero.runs.directory import expanded
from rankzero.runs.stored_config import flattened

SUFFIXES = (".yaml", ".yml", ".json")


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
    keys = [*(flag.lightning_key or flag.name for flag in command.flags), "model", "data"]
    values = {key: value for key in keys if (value := _get(translated, key)) is not None}
    return path if translated == content else yaml.safe_dump(translated, sort_keys=False), translated, values


def read_section(name: str, text: str) -> dict[str, Any]:
    """Reads the value of a flag that sets a whole section, such as `--trainer`: a YAML dict, or a file with one.

    Raises:
        RequestError: The file does not exist, or the value is not YAML or not a dict.
    """
    if text.lstrip().startswith("{"):
        return _parsed(text, f"--{name} {text}")
    return _load(text, name)


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
        names = sorted(entry.name for entry in folder.glob("[!.]*") if entry.suffix in SUFFIXES)
        by_stem = {Path(name).stem: name for name in names}  # all names are similar in their suffix
        suggestion = by_stem.get(nearest(file.stem, by_stem) or "")
        raise RequestError(
            f"--{flag} {path}",
            f"there is no such file; {folder.resolve()} contains {', '.join(names) if names else 'no .yaml file'}",
            f"--{flag} {folder / suggestion}" if suggestion else f"--{flag} FILE, or omit it",
        )
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
    if section:
        content[section] = {**(content.get(section) or {}), name: value}
    else:
        content[name] = value


def _get(content: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    container = content.get(section) if section else content
    return container.get(name) if isinstance(container, dict) else None


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
