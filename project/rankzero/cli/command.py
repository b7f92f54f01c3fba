"""Commands: their flags, the short names of models and data, and their help. Does not import torch."""

import re
from types import ModuleType
from typing import NamedTuple

from rankzero.cli.flags import FLAGS, Flag, flags_of
from rankzero.cli.foreign_flags import equivalent_flag
from rankzero.cli.user_classes import unknown_class_error
from rankzero.messages import RequestError, quoted, similar_names, spelled

SUBCOMMANDS = {
    "fit": ("fit", ()),
    "validate": ("evaluate", ("--split", "val")),
    "test": ("evaluate", ("--split", "test")),
    "predict": ("predict", ()),
}
"""LightningCLI's subcommand -> the script in `launch/` that runs it, and the flags to add."""

OTHER_SUBCOMMANDS = {"train": "fit", "eval": "validate", "evaluate": "validate", "infer": "predict"}
"""Name of a subcommand in other programs -> LightningCLI's subcommand."""

LIGHTNING_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything")
"""Top-level keys that every LightningCLI accepts."""

OTHER_ROWS = {
    "Launching": {"--explain": "print the detected launcher and the variables that show it; start nothing"},
    "Advanced": {
        "--config FILE": "read flags from a YAML file; --print_config prints one",
        "--model.X --data.X --trainer.X": "set any argument of these; --help_all and --model.help NAME list them",
    },
}
"""Title of a group in the help -> options that are not in the table of flags, with their descriptions."""


class Command(NamedTuple):
    """A command: its name, purpose and examples.

    Args:
        name: Name of the script, as in `launch/<name>.py`.
        purpose: One line for the help.
        examples: Example command lines that run unchanged.
        models: Package whose `__all__` lists the short names for `--model`.
        data: Package whose `__all__` lists the short names for `--data`.
        default_model: Short name of the model to use without `--model`.
        default_data: Short name of the data module to use without `--data`.
        stops_at_safe_point: Whether a signal stops the command at a safe point; False means immediately.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    models: ModuleType
    data: ModuleType
    default_model: str | None = None
    default_data: str | None = None
    stops_at_safe_point: bool = False

    @property
    def flags(self) -> tuple[Flag, ...]:
        return flags_of(self.name)

    @property
    def own_flags(self) -> list[Flag]:
        """Flags that are not another name for a LightningCLI key."""
        return [flag for flag in self.flags if flag.lightning_key is None]

    @property
    def keys(self) -> dict[str, str]:
        """Name or alias of a short flag -> its LightningCLI key, or the flag's name if it has none."""
        return {name: flag.lightning_key or flag.name for flag in self.flags for name in (flag.name, *flag.aliases)}

    def help(self) -> str:
        """Returns the help: common flags first, then all other flags by group."""
        packages = {"model": self.models, "data": self.data}
        classes = {f"--{name} NAME": f"{', '.join(packages[name].__all__)}, or a class path" for name in packages}
        lines = [f"python launch/{self.name}.py: {self.purpose} (defaults are in brackets)", ""]
        for title, flags in FLAGS.items():
            rows = dict(OTHER_ROWS.get(title, {})) if title else classes
            for flag in flags:
                if self.name in flag.commands:
                    alias_note = f" (also {', '.join(f'--{name}' for name in flag.aliases)})" if flag.aliases else ""
                    rows[f"--{flag.name} {flag.metavar}"] = flag.help + alias_note
            group_lines = [f"  {option:<31} {description}" for option, description in rows.items()]
            title = title.replace("train", {"fit": "train", "preflight": "check"}.get(self.name, self.name))
            lines += [*([f"{title}:"] if title and group_lines else []), *group_lines, *([""] if group_lines else [])]
        return spelled("\n".join([*lines, *(f"  {example}" for example in self.examples)]))

    def class_path(self, flag: str, text: str) -> str:
        """Returns the class path of a short name, or of FILE:CLASS; returns config files and dicts unchanged.

        Raises:
            RequestError: The short name does not exist.
        """
        package: ModuleType = getattr(self, "models" if flag == "model" else "data")
        if text in package.__all__:
            return f"{package.__name__}.{text}"
        if ("." in text and not text.endswith(".py")) or text.startswith("{"):
            return re.sub(r"^([\w./]+)\.py:(\w+)$", lambda found: f"{found[1].replace('/', '.')}.{found[2]}", text)
        raise unknown_class_error(flag, text, package.__all__)

    def unknown_flag_error(self, name: str, file: str, value: str | None = None, model: str = "") -> RequestError:
        """Returns the error for a flag, or a key of a config file, that does not exist.

        Args:
            name: The flag without dashes, or the key.
            file: Path of the config file; empty for the command line.
            value: The value of the flag or of the key, if any.
            model: The short name of the model; empty for a class path.
        """
        command_line_only = () if file else ("config", "explain", "print_config", "help", "help_all")
        valid_names = [*self.keys, *LIGHTNING_KEYS, *command_line_only]
        dashes, source = ("", f", in --config {file}") if file else ("--", "")
        separator = ": " if file else " "
        similar = similar_names(name.split(".")[0], valid_names)
        instead = equivalent_flag(name, value, valid_names, model)
        value_text = "" if value is None else f"{separator}{quoted(value)}"
        if instead and file:
            instead = separator.join(instead.removeprefix("--").split(" ", 1))
        if not instead and similar:
            rest = name[len(name.split(".")[0]) :] if similar[0] in LIGHTNING_KEYS else ""
            instead = f"{dashes}{similar[0]}{rest}{value_text}"
        listing = f"; similar names: {', '.join(dashes + name for name in similar)}" if len(similar) > 1 else ""
        found = f"there is no {'such key' if file else 'flag of that name'}{listing}"
        instead = instead or f"python launch/{self.name}.py --help"
        return RequestError(f"{dashes}{name}{value_text}{source}", found, instead)
