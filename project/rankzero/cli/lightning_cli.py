"""Rankzero's LightningCLI: builds data and model from a command line, and the arguments of the Trainer."""

import inspect
import re
from pydoc import locate
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from rankzero.cli.arguments import Arguments
from rankzero.cli.parser import HelpFormatter, RankzeroParser, reader, without_enums
from rankzero.cli.trainer_arguments import TRAINER_FLAGS
from rankzero.cli.user_classes import classes_defined_in, missing_requirement_error
from rankzero.messages import RequestError
from rankzero.runs.stored_config import SINGLE_START_ARGUMENTS, Config, flattened, without_objects
from rankzero.training.lightning_inside import add_configure_optimizers

LINKED_ARGUMENTS = ("in_features", "out_features", "in_channels", "image_size", "num_classes")
"""Arguments of the model that default to the data module's attributes of the same names."""


class RankzeroCLI(LightningCLI):
    """LightningCLI with Rankzero's flags; builds data and model, but no Trainer."""

    def __init__(self, flags: Arguments) -> None:
        self.flags = flags
        description = "--help lists Rankzero's flags; --model.help NAME lists the arguments of a model."
        super().__init__(
            run=False,
            args=list(flags.arguments),
            save_config_callback=None,
            load_from_checkpoint_support=False,
            parser_class=RankzeroParser,
            parser_kwargs={"description": description, "formatter_class": HelpFormatter, "allow_abbrev": False},
            trainer_defaults={"log_every_n_steps": 10, "enable_model_summary": False},
            seed_everything_default=0,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        assert isinstance(parser, RankzeroParser)
        parser.origins = self.flags.origins
        for flag in self.flags.command.own_flags:
            parser.add_argument(
                f"--{flag.name}", metavar=flag.metavar, type=reader(flag.read), default=flag.default, help=flag.help
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)
        trainer_config = self.config.trainer
        if trainer_config.max_epochs is None and trainer_config.max_steps == -1 and trainer_config.max_time is None:
            trainer_config.max_epochs = 20

    def instantiate_classes(self) -> None:
        """Builds the data module, then the model; missing `LINKED_ARGUMENTS` are taken from the data module."""
        model_class = locate(self.config.model.class_path)
        included_models = [getattr(self.flags.command.models, name) for name in self.flags.command.models.__all__]
        lacks_loaders = False
        if "data" not in self.flags.explicitly_set and model_class not in included_models:
            self.config.data = None
            has_method = getattr(model_class, "train_dataloader", None) is not LightningModule.train_dataloader
            lacks_loaders = self.flags.command.default_data is not None and not has_method
        config = self.config.clone()
        data: LightningDataModule | None = self._instantiate(Namespace(data=config.pop("data"))).data
        arguments = config.model.get("init_args") or Namespace()
        for name in LINKED_ARGUMENTS:
            if name in arguments and arguments[name] is None:
                arguments[name] = getattr(data, name, None)
        try:
            self.config_init = self._instantiate(config)
        except Exception as error:
            if lacks_loaders and any(arguments.get(name, 0) is None for name in LINKED_ARGUMENTS):
                raise self._no_data_error(model_class) from None
            if not isinstance(error, ValueError):
                raise
            match = re.match(r"(\w+) needs (\w+) \(", str(error)) if model_class in included_models else None
            raise (self._misfit_error(str(error), match[1], match[2], data) if match else error) from None
        self.model: LightningModule = self.config_init.model
        if lacks_loaders and "train_dataloader" not in vars(self.model):
            raise self._no_data_error(model_class)
        self.datamodule = data
        add_configure_optimizers(self)

    def _no_data_error(self, model_class: Any) -> RequestError:
        """Returns the error for a model that is not included and has no training loaders of its own."""
        names, default = self.flags.command.data.__all__, self.flags.command.default_data
        own = _classes_beside(model_class, LightningDataModule)
        lacks = f"no data: {model_class.__name__} has no train_dataloader"
        found = f"{lacks}; choose {', '.join(names)}, or a class path"
        return RequestError(self.flags.origins.request_for("model"), found, f"--data {own[0] if own else default}")

    def _misfit_error(self, found: str, model: str, argument: str, data: LightningDataModule | None) -> RequestError:
        """Returns the error for an included model that needs an argument that the data module does not have."""
        models, origins = self.flags.command.models, self.flags.origins
        fitting = _classes_beside(type(data), LightningModule)
        for name in models.__all__:
            linked = [key for key in inspect.signature(getattr(models, name)).parameters if key in LINKED_ARGUMENTS]
            fitting += [name] if name != model and hasattr(data, linked[0]) else []
        requests = [origins.request_for(key) for key in ("model", "data") if key in self.flags.explicitly_set]
        otherwise = f"--model.{argument} N, or give {type(data).__name__} an attribute {argument}"
        return RequestError(" ".join(requests), found, f"--model {fitting[0]}" if fitting else otherwise)

    def _instantiate(self, config: Namespace) -> Namespace:
        try:
            instances: Namespace = self.parser.instantiate(config)
        except ValueError as error:
            if refusal := missing_requirement_error(error, flattened(config.as_dict()), self.flags.origins):
                raise refusal from None
            # jsonargparse wraps an error raised by a class's __init__ in its report of mismatched types.
            raise (error.__cause__ if isinstance(error.__cause__, Exception) else error) from None
        return instances

    @property
    def data_batch_size(self) -> int | None:
        """Batch size of the data module; None if it is the default or not an argument of the data module."""
        parameter = inspect.signature(type(self.datamodule).__init__).parameters.get("batch_size")
        size: int | None = getattr(self.datamodule, "batch_size", None)
        return None if parameter is None or parameter.default == size else size

    @property
    def title(self) -> str:
        """Name of a run without `--name`, before its number: `<model>-<data>`."""
        return f"{type(self.model).__name__}-{type(self.datamodule).__name__ if self.datamodule else 'own'}"

    @property
    def stored_config(self) -> Config:
        """Configuration that starts a similar run; flags of a single start, such as `--name`, are left out."""
        config = without_objects(yaml.safe_load(self.parser.dump(without_enums(self.config), skip_unset=False)))
        for name in (*SINGLE_START_ARGUMENTS, *(() if self.datamodule else ("data",))):
            config.pop(name, None)
        return config

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments of `rankzero.Trainer`."""
        own_arguments = {name: value for name, value in self.config_init.items() if name in TRAINER_FLAGS}
        return {**own_arguments, **self.config_init.trainer.as_dict()}


def _classes_beside(one: type, base: type) -> list[str]:
    """Returns the class paths of the subclasses of `base` that the module of another class defines."""
    return [f"{one.__module__}.{name}" for name in classes_defined_in(one.__module__, base)]
