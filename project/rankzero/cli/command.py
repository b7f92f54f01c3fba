"""What a command line may say: its flags, the models and data it knows by name, its help. Imports no torch."""

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
"""LightningCLI's subcommand -> the script in `launch/` that does it, and the flags that go with it."""

OTHER_SUBCOMMANDS = {"train": "fit", "eval": "validate", "evaluate": "validate", "infer": "predict"}
"""What people call the subcommands elsewhere."""

LIGHTNING_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything")
"""The top-level keys of every LightningCLI."""


EVERY_DAY = ("model", "data", "epochs", "name", "devices")
"""The flags that the help shows first."""

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
"""The groups of the help, in its order, and their flags."""


class Command(NamedTuple):
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
        stops_safely: Whether a signal has it stop at a safe point, rather than end at once.
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
        """The flags that are arguments of our own, not other names for Lightning's."""
        return [flag for flag in self.flags if flag.lightning_key is None]

    @property
    def keys(self) -> dict[str, str]:
        """Every name of a short flag -> the LightningCLI key that it is, or its own name."""
        return {name: flag.lightning_key or flag.name for flag in self.flags for name in (flag.name, *flag.aliases)}

    def help(self) -> str:
        """The help: the flags of every day, then the others in groups."""
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
        """Returns the class path of a short class name; leaves class paths and config files as they are."""
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
        """The error for a flag, or a key of a config file, that does not exist.

        Args:
            name: The flag, without dashes, or the key.
            where: The config file; empty for the command line.
            value: The flag's value, if any.
            model: The short name of the model, if it is one of ours.
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
