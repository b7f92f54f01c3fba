"""The command line: flags -> data, model, Trainer, run."""

import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.attempt import Attempt
from project.environments.detect import Launch
from project.errors import Exit, RequestError, nearest, saying_why
from project.flags import Flags
from project.quiet import quieten
from project.sampling.sharding import Sharding
from project.trainer import build_trainer
from project.world import World, resolve_world, start_processes

LINKED = ("in_features", "out_features", "in_channels", "image_size", "num_classes")
"""What a model has to know of the data: an argument of the model that nobody gave is taken from the data module's
attribute of the same name."""

DEFAULT_EPOCHS = 20


def fit(flags: Flags, launch: Launch) -> int:
    """Trains, or carries on. All ranks must call.

    Returns:
        The exit code, see `project.errors.Exit`.

    Raises:
        CannotStart: The request cannot be met; nothing was trained and nothing is left behind.
    """
    quieten()
    attempt: Attempt | None = None
    try:
        with saying_why(begun=lambda: attempt is not None and attempt.begun):
            cli = RankzeroCLI(flags)
            world = resolve_world(flags, launch)
            if (code := start_processes(world, launch)) is not None:
                return code
            trainer = cli.build_trainer(world, launch)
            attempt = Attempt(cli, trainer, world, launch)
            if attempt.already_finished:
                return Exit.FINISHED
            with attempt:
                trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=attempt.checkpoint)
            return Exit.FINISHED
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """Destroys the process group; without this about one gloo run in ten ends with signal 6 after all is done."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class RankzeroParser(LightningArgumentParser):
    """Lightning's parser; a mistake is one message."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise parsing_error(message, self._option_string_actions)


class RankzeroCLI(LightningCLI):
    """LightningCLI with our own arguments; builds data and model, and the Trainer when the world is known.

    Args:
        flags: The command line.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        super().__init__(
            run=False,
            args=list(flags.arguments),
            save_config_callback=None,
            load_from_checkpoint_support=False,
            parser_class=RankzeroParser,
            trainer_defaults={"max_epochs": DEFAULT_EPOCHS, "log_every_n_steps": 10, "enable_model_summary": False},
            seed_everything_default=0,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for flag in self.flags.command.own_flags:
            parser.add_argument(f"--{flag.name}", type=_reader(flag.read), default=flag.default, help=flag.help)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        if self.config.batch_size and self.config.global_batch_size:
            raise RequestError(
                f"--batch_size {self.config.batch_size} and --global_batch_size {self.config.global_batch_size}",
                "they say the same thing in two ways",
                "one of the two",
            )

    def instantiate_classes(self) -> None:
        """Builds the data module, then the model with what it has to know of the data; no Trainer yet."""
        config = self.config.clone()
        data: LightningDataModule | None = self.parser.instantiate_classes(Namespace(data=config.pop("data"))).data
        arguments = config.model.get("init_args") or Namespace()
        for name in LINKED:
            if name in arguments and arguments[name] is None:
                arguments[name] = getattr(data, name, None)
        self.config_init = self.parser.instantiate_classes(config)
        self.model: LightningModule = self.config_init.model
        own_loaders = is_overridden("train_dataloader", self.model) and "data" not in self.flags.given
        self.datamodule = None if own_loaders else data
        self._add_configure_optimizers_method_to_model(None)

    @property
    def seed(self) -> int:
        """The seed of everything, order of samples included."""
        return int(self.config.seed_everything)

    @property
    def title(self) -> str:
        """What an unnamed run is called: `<model>-<data>`."""
        data = type(self.datamodule).__name__ if self.datamodule else "own"
        return f"{type(self.model).__name__}-{data}"

    @property
    def config_text(self) -> str:
        """The configuration as YAML, to start another run like it: without the run's name and what it resumed."""
        config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        for name in ("run", "resume"):
            config.pop(name, None)
        return str(yaml.safe_dump(config, sort_keys=False))

    def build_trainer(self, world: World, launch: Launch) -> Trainer:
        """Builds the Trainer, with the run's order of samples."""
        sharding = Sharding(
            rank=launch.rank,
            world_size=world.size,
            seed=self.seed,
            batch_size=self.config.batch_size,
            global_batch_size=self.config.global_batch_size,
        )
        return build_trainer(self.config_init.trainer.as_dict(), world, launch, sharding)


def _reader(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Lets a flag's reader read what YAML has made a number of already."""

    def read_any(value: Any) -> Any:
        return read(str(value))

    return read_any


def parsing_error(message: str, options: Iterable[str]) -> RequestError:
    """Makes a message of ours of what jsonargparse says, which is several lines of its own terms.

    Args:
        message: What it says.
        options: Every option that there is.
    """
    options = list(options)
    if match := re.match(r"[Uu]nrecognized arguments: (\S+)", message):
        name = match[1].split("=")[0]
        near = nearest(name, options)
        return RequestError(match[1], "there is no such flag", near or "--help_all to see all there are")
    key = match[1] if (match := re.search(r'[Pp]arser key "([^"]+)"', message)) else None
    if match := re.search(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'", message):
        group = match[1] or key or ""
        asked = f"{group}.{match[2]}".strip(".")
        known = [option[2:] for option in options if option.startswith(f"--{group}.")]
        near = nearest(asked, known)
        return RequestError(asked, f"{group or 'it'} has no such argument", near or f"--{group}.help to see those it has")
    noise = re.compile(r"^(Parser key|Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value)")
    lines = [line.strip(" -") for line in message.splitlines()]
    found = "\n".join(line for line in lines if line and not noise.match(line)) or message
    return RequestError(f"--{key}" if key else "this command line", found, "--help_all to see what it may be")
