"""Commands: their flags, the short names of models and data, and their help. Does not import torch."""

from types import ModuleType
from typing import NamedTuple

from rankzero.cli.flags import Flag
from rankzero.cli.foreign_flags import known_elsewhere, near_names, quoted
from rankzero.messages import RequestError, nearest, spelled

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


EVERY_DAY = ("model", "data", "epochs", "name", "devices")
"""Flags that the help lists first."""

GROUPS = {
    "What to train": ("batch_size", "global_batch_size", "max_device_batch_size", "precision", "fast", "seed", "split"),
    "How long": ("time_limit", "requeue", "max_attempts"),
    "Where and on what": ("nodes", "accelerator", "root", "output", "export"),
    "Saving and resuming": (
        *("save_every", "keep", "keep_best", "save_errors", "resume", "checkpoint"),
        *("accept_changed", "trust_checkpoint"),
    ),
    "Launching": (
        *("launcher", "explain", "start_timeout", "backend", "interface"),
        *("node_rank", "master_addr", "master_port"),
    ),
    "Advanced": ("config", "model.X", "help_all"),
}
"""Title of each further group in the help -> its flags."""


class Command(NamedTuple):
    """A command: its name, purpose, flags and examples.

    Args:
        name: Name of the script, as in `launch/<name>.py`.
        purpose: One line for the help.
        flags: The short flags of the command.
        examples: Example command lines that run unchanged.
        models: Package whose `__all__` lists the short names for `--model`.
        data: Package whose `__all__` lists the short names for `--data`.
        default_model: Short name of the model to use without `--model`.
        default_data: Short name of the data module to use without `--data`.
        stops_safely: Whether a signal stops the command at a safe point; False means immediately.
    """

    name: str
    purpose: str
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]
    models: ModuleType
    data: ModuleType
    default_model: str | None = None
    default_data: str | None = None
    stops_safely: bool = False

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
        rows = {
            "model": ("--model NAME", self._names(self.models)),
            "data": ("--data NAME", self._names(self.data)),
            "explain": ("--explain", "say which launcher is detected and from what; start nothing"),
            "config": ("--config FILE", "read flags from YAML, short or as --print_config writes them"),
            "model.X": ("--model.X --data.X --trainer.X", "set any argument of theirs"),
            "help_all": ("--help_all", "list all arguments of the model, the data and the Trainer"),
        }
        for flag in self.flags:
            also = f" (also {', '.join(f'--{name}' for name in flag.aliases)})" if flag.aliases else ""
            rows[flag.name] = (f"--{flag.name} {flag.metavar}", flag.help + also)
        lines = [f"python launch/{self.name}.py: {self.purpose}", ""]
        for title, names in {"": EVERY_DAY, **GROUPS}.items():
            shown = [f"  {left:<31} {right}" for left, right in (rows[name] for name in names if name in rows)]
            title = title.replace("train", "train" if self.name == "fit" else self.name)
            lines += [*([f"{title}:"] if title and shown else []), *shown, *([""] if shown else [])]
        return spelled("\n".join([*lines, *(f"  {example}" for example in self.examples)]))

    @staticmethod
    def _names(package: ModuleType) -> str:
        return ", ".join(package.__all__) + ", or a class path"

    def class_path(self, flag: str, text: str) -> str:
        """Returns the class path of a short name; returns class paths, config files and dicts unchanged.

        Raises:
            RequestError: The short name does not exist.
        """
        package: ModuleType = getattr(self, "models" if flag == "model" else "data")
        if text in package.__all__:
            return f"{package.__name__}.{text}"
        if "." in text or text.startswith("{"):
            return text
        near = nearest(text, package.__all__)
        raise RequestError(
            f"--{flag} {text}",
            f"no {flag} of that name; there are {', '.join(package.__all__)}, and any class path (my_package.MyClass)",
            f"--{flag} {near or package.__all__[0]}",
        )

    def unknown(self, name: str, where: str, value: str | None = None, model: str = "") -> RequestError:
        """Returns the error for a flag, or a key of a config file, that does not exist.

        Args:
            name: The flag without dashes, or the key.
            where: Path of the config file, with a colon and a space; empty for the command line.
            value: The value of the flag, if any.
            model: The short name of the model; empty for a class path.
        """
        on_line = () if where else ("config", "explain", "print_config", "help", "help_all")
        legal = [*self.keys, *LIGHTNING_KEYS, *on_line]
        dashes = "" if where else "--"
        near = near_names(name.split(".")[0], legal)
        instead = known_elsewhere(name, value, legal, model)
        if instead and where:
            instead = ": ".join(instead.removeprefix("--").split(" ", 1))
        if not instead and near:
            rest = "" if value is None or where else f" {quoted(value)}"
            instead = f"{dashes}{near[0]}{name[len(name.split('.')[0]) :] if near[0] in LIGHTNING_KEYS else ''}{rest}"
        listed = f"; near it: {', '.join(dashes + name for name in near)}" if len(near) > 1 else ""
        given = "" if value is None else f" {quoted(value)}"
        return RequestError(
            f"{where}{dashes}{name}{given}",
            f"there is no {'such key' if where else 'flag of that name'}{listed}",
            instead or f"python launch/{self.name}.py --help",
        )
