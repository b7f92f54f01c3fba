"""Config files: YAML with LightningCLI's keys or Rankzero's short flags. Does not import torch."""

import re
from pathlib import Path
from typing import Any

import yaml

from rankzero.cli.command import LIGHTNING_KEYS, Command
from rankzero.messages import RequestError, nearest
from rankzero.runs.directory import expanded

SUFFIXES = (".yaml", ".yml", ".json")


def read_config(command: Command, path: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Reads a config file.

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
            raise command.unknown_flag_error(str(name), path, None if isinstance(value, dict | list) else str(value))
        translated[name] = _with_class_path(command, name, value) if name in ("model", "data") else value
    for flag in command.flags:
        for name in {flag.name, *flag.aliases} & translated.keys():
            value = translated.pop(name)
            if value is not None:
                try:
                    _put(translated, flag.lightning_key or flag.name, flag.value(str(value)))
                except RequestError as error:
                    example = error.instead.removeprefix(f"--{flag.name} ")
                    source = f"in --config {path}"
                    raise RequestError(
                        f"{name}: {value}, {source}", error.found, f"{name}: {example}, {source}"
                    ) from None
    keys = [*(flag.lightning_key or flag.name for flag in command.flags), "model", "data"]
    values = {key: value for key in keys if (value := _get(translated, key)) is not None}
    is_unchanged = translated == content
    return path if is_unchanged else yaml.safe_dump(translated, sort_keys=False), translated, values


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
    if not isinstance(short_name, str) or ("." in short_name and not short_name.endswith(".py")):
        return section
    settings = section if isinstance(section, dict) else {}
    return {**settings, "class_path": command.class_path(name, short_name)}


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
