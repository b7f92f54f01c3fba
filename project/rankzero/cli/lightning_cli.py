"""The command line: flags -> data, model, Trainer, run."""

import inspect
from functools import cached_property
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

from rankzero.cli.arguments import Flags
from rankzero.cli.parser import RankzeroParser, reader, without_enums
from rankzero.distributed.coordinator import Team
from rankzero.distributed.devices import World, resolve_world, start_processes
from rankzero.distributed.process.quiet import quieten
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.rendezvous.client import Meeting
from rankzero.messages import Exit, LeftEarlyError, RequestError, Stopped, saying_why, show
from rankzero.runs.attempt import Attempt
from rankzero.runs.stored_config import dump_config, without_objects
from rankzero.sampling.plan import Sharding
from rankzero.trainer import build_trainer
from rankzero.training.fast import layout as tuning

LINKED = ("in_features", "out_features", "in_channels", "image_size", "num_classes")
"""What a model has to know of the data: an argument of the model that nobody gave is taken from the data module's
attribute of the same name."""

DEFAULT_EPOCHS = 20

OF_ONE_START = (
    *("name", "resume", "accept_changed", "trust_checkpoint"),
    *("node_rank", "master_addr", "master_port", "interface"),
)
"""Arguments that another run like this one does not take over."""


def fit(flags: Flags, meeting: Meeting) -> int:
    """Trains, or carries on. All ranks must call.

    Returns:
        The exit code, see `rankzero.messages.Exit`.

    Raises:
        CannotStart: The request cannot be met; nothing was trained and nothing is left behind.
    """
    quieten(meeting.launch.rank or 0)
    if (code := start_processes(flags, meeting.launch)) is not None:
        return code
    attempt: Attempt | None = None
    with Team(meeting, flags) as team, saying_why(begun=lambda: attempt is not None and attempt.begun):
        SIGNALS.tell(lambda signum: team.lifeline.ask_to_stop(signum.name))
        world = resolve_world(flags, team)
        cli = team.together(lambda: RankzeroCLI(flags))
        cli.tune(world, team)
        trainer = team.together(lambda: cli.build_trainer(world, team))
        attempt = Attempt(cli, trainer, world, team)
        if attempt.already_finished:
            return Exit.FINISHED
        try:
            with attempt:
                trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=attempt.checkpoint)
        except Stopped:
            team.leave_together()
            return Exit.STOPPED
        except (SystemExit, KeyboardInterrupt) as error:
            raise LeftEarlyError(f"the code that was trained called for an end: {error!r}") from error
        except Exception as error:
            raise attempt.first_error or error from None
        return Exit.FINISHED


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
            trainer_defaults={"log_every_n_steps": 10, "enable_model_summary": False},
            seed_everything_default=0,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, RankzeroParser)
        parser.origins = self.flags.origins
        for flag in self.flags.command.own_flags:
            parser.add_argument(f"--{flag.name}", type=reader(flag.read), default=flag.default, help=flag.help)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        limits = self.config.trainer
        if limits.max_epochs is None and limits.max_steps == -1 and limits.max_time is None:
            limits.max_epochs = DEFAULT_EPOCHS
        if self.config.batch_size and self.config.global_batch_size:
            raise RequestError(
                f"--batch_size {self.config.batch_size} and --global_batch_size {self.config.global_batch_size}",
                "they say the same thing in two ways",
                "one of the two",
            )

    def instantiate_classes(self) -> None:
        """Builds the data module, then the model with what it has to know of the data; no Trainer yet."""
        config = self.config.clone()
        data: LightningDataModule | None = self._instantiate(Namespace(data=config.pop("data"))).data
        arguments = config.model.get("init_args") or Namespace()
        for name in LINKED:
            if name in arguments and arguments[name] is None:
                arguments[name] = getattr(data, name, None)
        self.config_init = self._instantiate(config)
        self.model: LightningModule = self.config_init.model
        own_loaders = is_overridden("train_dataloader", self.model) and "data" not in self.flags.given
        self.datamodule = None if own_loaders else data
        self._add_configure_optimizers_method_to_model(None)

    def _instantiate(self, config: Namespace) -> Namespace:
        try:
            instances: Namespace = self.parser.instantiate(config)
        except ValueError as error:
            # The error of a class's own __init__ comes wrapped in jsonargparse's account of types that did not fit.
            raise (error.__cause__ if isinstance(error.__cause__, Exception) else error) from None
        return instances

    def _asked_data_batch_size(self) -> int | None:
        """The value of `--data.batch_size`, where it is not the data module's own default."""
        parameter = inspect.signature(type(self.datamodule).__init__).parameters.get("batch_size")
        size: int | None = getattr(self.datamodule, "batch_size", None)
        return None if parameter is None or parameter.default == size else size

    @property
    def seed(self) -> int:
        """The seed of everything, order of samples included."""
        return int(self.config.seed_everything)

    @property
    def title(self) -> str:
        """What an unnamed run is called: `<model>-<data>`."""
        data = type(self.datamodule).__name__ if self.datamodule else "own"
        return f"{type(self.model).__name__}-{data}"

    @cached_property
    def config_text(self) -> str:
        """The configuration as YAML, to start another run like it: without the run's name and what it resumed."""
        config = without_objects(yaml.safe_load(self.parser.dump(without_enums(self.config), skip_unset=False)))
        for name in (*OF_ONE_START, *(() if self.datamodule else ("data",))):
            config.pop(name, None)
        return dump_config(config)

    @property
    def trusted(self) -> bool:
        """Whether a checkpoint may hold what can run any code."""
        return bool(self.config.trust_checkpoint == "yes")

    def tune(self, world: World, team: Team) -> None:
        """Does what `--fast yes` asks for. The configuration then says which precision it is. All ranks must call."""
        if self.config.fast != "yes":
            return
        bf16 = all(team.exchange(tuning.computes_in_bf16(world.accelerator)))
        chosen = tuning.choose(self.model, world.accelerator, bf16, self.config.trainer.precision)
        chosen.apply(self.model)
        if chosen.precision:
            self.config.trainer.precision = self.config_init.trainer.precision = chosen.precision
        if team.launch.rank == 0:
            show(f"rankzero: --fast: {chosen.reasons}")

    def build_trainer(self, world: World, team: Team) -> Trainer:
        """Builds the Trainer, with the run's order of samples."""
        sharding = Sharding(
            rank=team.launch.rank or 0,
            world_size=world.size,
            seed=self.seed,
            batch_size=self.config.batch_size,
            global_batch_size=self.config.global_batch_size,
            data_batch_size=self._asked_data_batch_size(),
            micro_batches=self.config_init.trainer.accumulate_grad_batches,
            max_device_batch_size=self.config.max_device_batch_size,
            accept_changed_data="data" in (self.config.get("accept_changed") or ""),
        )
        return build_trainer(self.config_init.trainer.as_dict(), world, team, sharding, self.trusted)
