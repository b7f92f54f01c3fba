"""Command lines of commands that train nothing: flags, and arguments without a flag. Does not import torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.cli.flags.table import Flag
from rankzero.distributed.process import interrupts
from rankzero.distributed.stop_and_failure.error_reporter import refuse
from rankzero.messages import CannotStart, RequestError, flush_streams, quoted, similar_names, spelled


class CommandLine(NamedTuple):
    """A parsed command line.

    Args:
        values: Name of a flag -> its value, or its default. A flag without a placeholder has True or False. A flag
            whose default is a tuple has a tuple of all its values.
        positional: Arguments without a flag.
        wants_help: Whether `--help` was given.
    """

    values: Mapping[str, Any]
    positional: Sequence[str]
    wants_help: bool


def exit_code_of(work: Callable[[], int]) -> int:
    """Calls a function that returns an exit code; prints the message of a request that cannot be fulfilled."""
    try:
        interrupts.restore()
        return work()
    except KeyboardInterrupt:
        return 130
    except CannotStart as error:
        return refuse(error, None)
    finally:
        flush_streams()


def parse(command: str, flags: Sequence[Flag], tokens: Sequence[str]) -> CommandLine:
    """Parses a command line.

    Raises:
        RequestError: A flag does not exist, lacks its value, or its value is invalid.
    """
    by_name = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    values: dict[str, Any] = {flag.name: flag.default if flag.metavar else False for flag in flags}
    positional, wants_help, tokens = [], False, list(tokens)
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            positional += tokens
            break
        if not token.startswith("-") or token == "-":
            positional.append(token)
            continue
        name, equals, text = token.removeprefix("--").partition("=")
        if token == "-h" or name == "help":
            wants_help = True
            continue
        if name not in by_name:
            raise _unknown_flag(command, by_name, token)
        flag = by_name[name]
        if not flag.metavar:
            if equals:
                raise RequestError(token, "this flag has no value", f"--{name}")
            values[flag.name] = True
            continue
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise RequestError(f"--{name}", "it has no value", f"--{name} {flag.example}")
            text = tokens.pop(0)
        value = flag.value(text)
        earlier = values[flag.name]
        values[flag.name] = (*earlier, value) if isinstance(earlier, tuple) else value
    return CommandLine(values, positional, wants_help)


def help_text(title: str, flags: Sequence[Flag], examples: Sequence[str]) -> str:
    """Returns the help of a command."""
    rows = [(f"--{flag.name} {flag.metavar}".rstrip(), flag.help) for flag in flags]
    width = max(len(option) for option, _ in rows)
    lines = [title, "", *(f"  {option:<{width}}  {description}" for option, description in rows), ""]
    return spelled("\n".join([*lines, *(f"  {example}" for example in examples)]))


def _unknown_flag(command: str, by_name: Mapping[str, Flag], token: str) -> RequestError:
    typed, equals, value = token.partition("=")
    similar = similar_names(re.sub("^-+", "", typed), list(by_name))
    listing = ", ".join(f"--{name}" for name in by_name)
    instead = (
        f"--{similar[0]}" + f" {quoted(value)}" * bool(equals) if similar else f"python launch/{command}.py --help"
    )
    return RequestError(token, f"there is no flag of that name; the flags are {listing}", instead)
