"""The short flags that people type every day, and what they mean to the LightningCLI behind them.

Nothing here imports torch: `--help` and a mistyped flag are answered at once, on a login node too. A flag with a
`key` is another name for a LightningCLI key (`--epochs` is `--trainer.max_epochs`), in YAML as on the command line; one
without is an argument of our own that `project.cli` adds to the LightningCLI.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml

from project.errors import RequestError, nearest

LIGHTNING_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything")
"""The top-level keys of every LightningCLI."""

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def a_count(text: str) -> int:
    """Reads a whole number of 1 or more."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError("a whole number of 1 or more")
    return int(text)


def a_seed(text: str) -> int:
    """Reads a whole number that every generator takes for a seed."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) >= 2**32:
        raise ValueError("a whole number from 0 to 4294967295")
    return int(text)


def an_interval(text: str) -> str:
    """Reads how often to save: `5` (epochs), `200steps`, `90s`, `15min` or `2h`."""
    if not re.fullmatch(r"0*[1-9][0-9]*(steps?|s|min|h)?", text):
        raise ValueError("a number of epochs (5), of steps (200steps) or a time (15min, 2h)")
    return text


def a_run_name(text: str) -> str:
    """Reads a name that is one folder's name on every file system."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}", text):
        raise ValueError("a folder's name of letters, digits and . _ - + = @ (at most 128, not beginning with . or -)")
    return text


def a_path(text: str) -> str:
    """Reads a path."""
    if not text.strip() or "\0" in text:
        raise ValueError("a path")
    return text


def one_of(*legal: str) -> Callable[[str], str]:
    """Returns a reader of one of the `legal` words."""

    def read(text: str) -> str:
        if text not in legal:
            raise ValueError("one of " + ", ".join(legal))
        return text

    return read


@dataclass(frozen=True)
class Flag:
    """One short flag.

    Args:
        name: Its name, without the dashes.
        metavar: What stands for its value in the help.
        read: Reads its value from text, or raises a ValueError that says what would have been right.
        help: Its meaning, in one line.
        example: A value that is right, for error messages.
        key: The LightningCLI key that it is another name for.
        aliases: Further names.
        default: What it is when nobody says.
    """

    name: str
    metavar: str
    read: Callable[[str], Any]
    help: str
    example: str
    key: str | None = None
    aliases: tuple[str, ...] = ()
    default: Any = None

    def value(self, text: str) -> Any:
        """Reads the value, or raises the `RequestError` that a person sees."""
        try:
            return self.read(text)
        except ValueError as error:
            near = nearest(text, str(error).removeprefix("one of ").split(", ")) if "one of" in str(error) else None
            raise RequestError(
                f"--{self.name} {text}", f"{text!r} is not {error}", f"--{self.name} {near or self.example}"
            ) from None


RUNNING = (
    Flag("nodes", "N", a_count, "machines", "2", key="trainer.num_nodes"),
    Flag("devices", "N", a_count, "processes a machine, each on a GPU or on the CPU", "2", key="trainer.devices"),
    Flag(
        "launcher",
        "NAME",
        one_of("auto", "local", "torchrun", "slurm"),
        "auto (decided from evidence), local, torchrun, slurm",
        "auto",
        default="auto",
    ),
    Flag("backend", "NAME", one_of("nccl", "gloo"), "nccl or gloo; left out: nccl on GPUs, gloo on CPUs", "gloo"),
    Flag(
        "accelerator",
        "NAME",
        one_of("auto", "cpu", "gpu", "cuda", "mps"),
        "auto, cpu, gpu",
        "cpu",
        key="trainer.accelerator",
    ),
    Flag(
        "precision",
        "P",
        one_of("32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true"),
        "32, bf16-mixed, 16-mixed, ...",
        "bf16-mixed",
        key="trainer.precision",
    ),
    Flag("batch_size", "N", a_count, "samples a step on each device", "32"),
    Flag("global_batch_size", "N", a_count, "samples a step over all devices; a resumed run keeps it", "128"),
    Flag("root", "DIR", a_path, "where runs are kept (runs)", "runs", default="runs"),
)

TRAINING = (
    Flag("run", "NAME", a_run_name, "the run's name; left out: the next free one, or the job's", "my-run"),
    Flag("epochs", "N", a_count, "passes over the data", "10", key="trainer.max_epochs", aliases=("total_epochs",)),
    Flag(
        "save_every",
        "N",
        an_interval,
        "epochs (5), steps (200steps) or time (15min) between checkpoints",
        "1",
        default="1",
    ),
    Flag(
        "resume",
        "HOW",
        a_path,
        "auto (carry on with this run), never, or a checkpoint's path",
        "auto",
        default="auto",
    ),
    Flag("seed", "N", a_seed, "seed of order, weights and augmentation", "0", key="seed_everything"),
)

EVALUATING = (
    Flag("run", "NAME", a_run_name, "the run to evaluate; left out: the newest", "my-run"),
    Flag("checkpoint", "PATH", a_path, "a checkpoint to evaluate; left out: the newest of --run", "runs/my-run"),
    Flag("split", "NAME", one_of("val", "test"), "val or test", "test", default="val"),
    Flag("output", "FILE", a_path, "where the JSON goes; left out: the run's directory", "metrics.json"),
)


@dataclass(frozen=True)
class Command:
    """A command line: its name, what it is for, its flags and its examples.

    Args:
        name: The script's name, as in `launch/<name>.py`.
        purpose: One line.
        flags: The short flags that it takes.
        examples: Lines that work as they stand.
        models: The package whose `__all__` names the models known by short names.
        data: The package whose `__all__` names the data modules known by short names.
        default_model: What is trained when nobody says.
        default_data: What it is trained on when nobody says.
    """

    name: str
    purpose: str
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]
    models: ModuleType
    data: ModuleType
    default_model: str | None = None
    default_data: str | None = None

    @property
    def own_flags(self) -> list[Flag]:
        """The flags that are arguments of our own, not other names for Lightning's."""
        return [flag for flag in self.flags if flag.key is None]

    @property
    def keys(self) -> dict[str, str]:
        """Every name of a short flag -> the LightningCLI key that it is, or its own name."""
        return {name: flag.key or flag.name for flag in self.flags for name in (flag.name, *flag.aliases)}

    def help(self) -> str:
        """The help: one screen."""
        rows = [("--model NAME", self._names(self.models)), ("--data NAME", self._names(self.data))]
        rows += [
            (f"--{flag.name} {flag.metavar}", flag.help + "".join(f" (also --{name})" for name in flag.aliases))
            for flag in self.flags
        ]
        rows += [
            ("--config FILE", "YAML with any of these, short or as LightningCLI's --print_config writes them"),
            ("--model.X --data.X --trainer.X", "any argument of theirs; all of them: --help_all"),
        ]
        lines = [f"python launch/{self.name}.py: {self.purpose}", ""]
        lines += [f"  {left:<31} {right}" for left, right in rows]
        return "\n".join([*lines, "", *(f"  {example}" for example in self.examples)])

    @staticmethod
    def _names(package: ModuleType) -> str:
        return ", ".join(package.__all__) + ", or a class path"

    def class_path(self, flag: str, text: str) -> str:
        """Returns the class path of a short class name; leaves class paths and config files as they are."""
        package: ModuleType = getattr(self, "models" if flag == "model" else "data")
        if text in package.__all__:
            return f"{package.__name__}.{text}"
        if "." in text:
            return text
        near = nearest(text, package.__all__)
        raise RequestError(
            f"--{flag} {text}",
            f"no {flag} of that name; there are {', '.join(package.__all__)}, and any class path (my_package.MyClass)",
            f"--{flag} {near or package.__all__[0]}",
        )

    def unknown(self, name: str, where: str) -> RequestError:
        """The error for a flag, or a key of a config file, that nothing answers to."""
        legal = [*self.keys, *LIGHTNING_KEYS, *(() if where else ("config", "print_config", "help", "help_all"))]
        near = nearest(name.split(".")[0], legal)
        dashes = "" if where else "--"
        return RequestError(
            f"{where}{dashes}{name}",
            f"there is no {'such key' if where else 'flag of that name'}; there are "
            + ", ".join(f"{dashes}{word}" for word in legal),
            f"{dashes}{near}" if near else f"python launch/{self.name}.py --help",
        )


@dataclass(frozen=True)
class Flags:
    """A command line that has been read: what our own flags say, and the rest for the LightningCLI.

    Args:
        command: The command that was read.
        values: LightningCLI key, or own flag -> value, for what was given; the command line wins over config files.
        given: Which of `model` and `data` were given, by flag or config file.
        arguments: The command line for the LightningCLI.
    """

    command: Command
    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    arguments: Sequence[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """The value of a short flag as given, or its default."""
        flag = next(flag for flag in self.command.flags if flag.name == name)
        return self.values.get(flag.key or flag.name, flag.default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument (--\S+): expected (?:at least )?one argument", message)
        if match:
            name = match[1].split("/")[0]
            raise RequestError(name, "no value after it", f"{name} VALUE")
        raise RequestError(" ".join(sys.argv[1:]), message, "--help")


def read_flags(command: Command, arguments: Sequence[str]) -> Flags:
    """Reads a command line.

    Prints the help and leaves where that is what was asked.

    Raises:
        RequestError: A flag, a value, a model or data name or a config file is not there.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--help_all", action="store_true")
    parser.add_argument("-c", "--config", action="append", default=[])
    for name in ("model", "data"):
        parser.add_argument(f"--{name}")
    for flag in command.flags:
        parser.add_argument(f"--{flag.name}", *(f"--{alias}" for alias in flag.aliases), dest=flag.name)
    known, rest = parser.parse_known_args(list(arguments))
    if known.help:
        print(command.help())
        sys.exit(0)
    _check_rest(command, rest)

    values: dict[str, Any] = {}
    translated: list[str] = []
    for path in known.config:
        text, found = _read_config(command, path)
        values.update(found)
        translated.append(f"--config={text}")
    values.update(_long_names(command, rest))
    chosen = {name: getattr(known, name) for name in ("model", "data") if getattr(known, name) is not None}
    given = {*chosen, *(name for name in ("model", "data") if values.pop(name, None) is not None)}
    for name, default in (("model", command.default_model), ("data", command.default_data)):
        if default and name not in given:
            chosen[name] = default
    translated += [f"--{name}={command.class_path(name, text)}" for name, text in chosen.items()]
    translated += rest
    for flag in command.flags:
        if (text := getattr(known, flag.name)) is not None:
            value = flag.value(text)
            values[flag.key or flag.name] = value
            translated.append(f"--{flag.key or flag.name}={value}")
    if known.help_all:
        translated = ["--help"]
    return Flags(command, values, frozenset(given), translated)


def _check_rest(command: Command, rest: Sequence[str]) -> None:
    """Refuses what neither we nor the LightningCLI know, before torch is imported."""
    for i, token in enumerate(rest):
        if token.startswith("-") and not re.match(r"-[0-9.]", token):
            name = token.lstrip("-").split("=")[0]
            if name.split(".")[0] not in (*LIGHTNING_KEYS, "print_config"):
                raise command.unknown(name, where="")
        elif i == 0 or not rest[i - 1].startswith("--") or "=" in rest[i - 1]:
            raise RequestError(token, "a word that belongs to no flag", f"python launch/{command.name}.py --help")


def _long_names(command: Command, rest: Sequence[str]) -> dict[str, Any]:
    """The values of flags that were given by their LightningCLI key, such as `--trainer.devices 2`."""
    keys = {flag.key for flag in command.flags if flag.key}
    values = {}
    for i, token in enumerate(rest):
        name, equals, text = token.removeprefix("--").partition("=")
        if token.startswith("--") and name in keys:
            values[name] = yaml.safe_load(text if equals else "".join(rest[i + 1 : i + 2]))
    return values


def _read_config(command: Command, path: str) -> tuple[str, dict[str, Any]]:
    """Reads a config file.

    Returns:
        What to hand to the LightningCLI (the path, or YAML text with our short names put into Lightning's words), and
        what it says, by LightningCLI key.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path()
        there = sorted(entry.name for entry in folder.iterdir() if entry.suffix in CONFIG_SUFFIXES)
        near = nearest(file.name, there)
        raise RequestError(
            f"--config {path}",
            f"no such file; {folder.resolve()} holds {', '.join(there) if there else 'no .yaml file'}",
            f"--config {folder / near}" if near else "--config FILE, or leave it out",
        )
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RequestError(f"--config {path}", f"not YAML: {error}", "--print_config to see one that is") from None
    if not isinstance(content, dict):
        raise RequestError(f"--config {path}", "no key: value lines in it", "--print_config to see one that has")

    values: dict[str, Any] = {}
    renamed = False
    for name in list(content):
        key = command.keys.get(name)
        if key is None and name not in LIGHTNING_KEYS:
            raise command.unknown(str(name), where=f"{path}: ")
        if content[name] is None:
            continue
        if key is None:
            renamed |= name in ("model", "data") and _use_class_path(command, content, name)
            values[name] = content[name]
            continue
        flag = next(flag for flag in command.flags if name in (flag.name, *flag.aliases))
        values[key] = flag.value(str(content[name]))
        if key != name:
            renamed = True
            section, _, entry = key.rpartition(".")
            target = content.setdefault(section, {}) if section else content
            target[entry] = content.pop(name)
    for key in (flag.key for flag in command.flags if flag.key):
        section, _, entry = key.rpartition(".")
        if isinstance(content.get(section), dict) and content[section].get(entry) is not None:
            values.setdefault(key, content[section][entry])
    return (yaml.safe_dump(content, sort_keys=False) if renamed else str(file)), values


def _use_class_path(command: Command, content: dict[str, Any], name: str) -> bool:
    """Puts the class path in place of a short name in `model:` or `data:`; returns whether there was one."""
    section = content[name]
    short = section.get("class_path") if isinstance(section, dict) else section
    if not isinstance(short, str) or "." in short:
        return False
    path = command.class_path(name, short)
    content[name] = {**section, "class_path": path} if isinstance(section, dict) else {"class_path": path}
    return True
