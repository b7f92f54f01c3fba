"""Parses a command line as far as possible without importing torch.

`--help` and mistyped flags are answered at once, also on a login node. The rest is translated for LightningCLI.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import yaml

from rankzero.cli.command import LIGHTNING_KEYS, OTHER_SUBCOMMANDS, SUBCOMMANDS, Command
from rankzero.cli.config_file import Origins, read_config, read_section
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.environments.validate import requested_world
from rankzero.messages import RequestError, nearest, print_line, quoted


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
            section = {f"{name}.{key}": value for key, value in read_section(name, text).items()}
            values.update({key: section[key] for key in keys & section.keys()})
    return values
