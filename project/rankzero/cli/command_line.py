"""Command lines of commands that train nothing: flags, and arguments without a flag. Does not import torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rankzero.cli.flags import Flag
from rankzero.distributed.process import interrupts
from rankzero.distributed.stop_and_failure.error_reporter import refuse
from rankzero.messages import CannotStart, Exit, RequestError, flush_streams, print_line, quoted, similar_names, spelled


class CommandLine(NamedTuple):
    """A parsed command line.

    Args:
        values: Name of a given flag -> its value; True for a flag without a placeholder, and for `help`. A flag whose
            default is a tuple has a tuple of all its values.
        positional: Arguments without a flag.
        rest: The arguments after `--`; None without `--`.
    """

    values: Mapping[str, Any]
    positional: Sequence[str]
    rest: Sequence[str] | None = None


def run_command(
    name: str,
    title: str,
    flags: Sequence[Flag],
    examples: Sequence[str],
    work: Callable[[Mapping[str, Any], Sequence[str]], int],
    arguments: Sequence[str] | None,
) -> int:
    """Runs the command of `launch/<name>.py`, or prints its help, and returns the exit code.

    Calls `work` with the values of the flags, or their defaults, and the arguments without a flag. The first line of
    the help is `title`. Without `arguments`, the command line is `sys.argv[1:]`.
    """

    def run() -> int:
        tokens = sys.argv[1:] if arguments is None else arguments
        given, positional, rest = parse(flags, tokens, lambda typed, value, _: unknown_flag(name, flags, typed, value))
        if "help" in given:
            print_line(help_text(title, flags, examples))
            return Exit.FINISHED
        defaults = {flag.name: flag.default if flag.metavar else False for flag in flags}
        return work({**defaults, **given}, [*positional, *(rest or ())])

    return exit_code_of(run)


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


def parse(
    flags: Sequence[Flag], tokens: Sequence[str], unknown: Callable[[str, str, Mapping[str, Any]], RequestError]
) -> CommandLine:
    """Parses a command line.

    `unknown` returns the error for a flag that does not exist, given the flag as typed, its value (empty without one)
    and the values of the flags before it.

    Raises:
        RequestError: A flag does not exist, lacks its value, or its value is invalid.
    """
    by_name = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    values: dict[str, Any] = {}
    positional, rest, tokens = [], None, list(tokens)
    while tokens:
        token = tokens.pop(0)
        if token == "--":
            rest = tokens
            break
        if not token.startswith("-") or token == "-":
            positional.append(token)
            continue
        name, equals, text = ("help", "", "") if token == "-h" else token.removeprefix("--").partition("=")
        flag = by_name.get(name)
        if name == "help" or (flag and not flag.metavar):
            if equals:
                raise RequestError(token, "this flag has no value", f"--{name}")
            values[name] = True
            continue
        if flag is None:
            following = tokens[0] if tokens and not tokens[0].startswith("-") else ""
            raise unknown(token.partition("=")[0], text if equals else following, values)
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                raise RequestError(f"--{name}", "it has no value", f"--{name} {flag.example}")
            text = tokens.pop(0)
        flag.add(values, text)
    return CommandLine(values, positional, rest)


def unknown_flag(name: str, flags: Sequence[Flag], typed: str, value: str, meant: str | None = None) -> RequestError:
    """Returns the error for a flag of the command `name` that does not exist, with its value (empty without one).

    `meant` is the name of the flag that another program calls by this name, if any.
    """
    by_name = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    normalized = typed.lstrip("-").replace("-", "_")
    best = normalized if normalized in by_name else meant or next(iter(similar_names(normalized, by_name)), None)
    value_text = f" {quoted(value)}" if value and not (best and not by_name[best].metavar) else ""
    found = f"there is no flag of that name; the flags are {', '.join(f'--{flag.name}' for flag in flags)}"
    instead = f"--{best}{value_text}" if best else f"python launch/{name}.py --help"
    return RequestError(f"{typed}{value_text}", found, instead)


def help_text(title: str, flags: Sequence[Flag], examples: Sequence[str], actions: Sequence[Sequence[str]] = ()) -> str:
    """Returns the help of a command: its actions, with their descriptions, its flags, and examples."""
    options = [(f"--{flag.name} {flag.metavar}".rstrip(), flag.help) for flag in flags]
    width = max(len(name) for name, _ in (*actions, *options))
    tables = [[f"  {name:<{width}}  {description}" for name, description in rows] for rows in (actions, options)]
    blocks = [[title], *filter(None, tables), [f"  {example}" for example in examples]]
    return spelled("\n\n".join("\n".join(lines) for lines in blocks))
