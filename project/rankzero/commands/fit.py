"""The command `fit`: trains a model, or resumes its training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import data_modules
import lightning_modules
from rankzero.cli.arguments import Arguments
from rankzero.cli.command import Command
from rankzero.commands.start import fast_imports, start
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.world import World
from rankzero.messages import Exit, Stopped, as_user_errors

if TYPE_CHECKING:
    from rankzero.cli.lightning_cli import RankzeroCLI
    from rankzero.trainer import Trainer

FIT = Command(
    name="fit",
    purpose="train a model, or resume its training",
    examples=(
        "python launch/fit.py --model MLP --data Toy --epochs 50 --save_every 10 --batch_size 32",
        "torchrun --nproc-per-node 4 launch/fit.py --model ResNet --model.depth 50 --data FashionMNIST",
        "srun --nodes=2 --ntasks-per-node=4 python launch/fit.py --model my_package.MyModel --data my_package.MyData",
    ),
    models=lightning_modules,
    data=data_modules,
    default_model="ResNet",
    default_data="Digits",
    stops_at_safe_point=True,
)


def fit(flags: Arguments, world: World) -> int:
    """Imports torch, after the flags have been checked, and trains; returns the exit code. All ranks must call.

    Raises:
        CannotStart: The request cannot be fulfilled; nothing was trained and no file of the attempt remains.
    """
    with fast_imports():
        from rankzero.cli.lightning_cli import RankzeroCLI
        from rankzero.distributed.coordination.session import Session
        from rankzero.distributed.process.quiet import silence_warnings
        from rankzero.trainer import Trainer
    silence_warnings(world.rank)
    if flags.only_prints:
        RankzeroCLI(flags)  # prints and exits
    trainer: Trainer | None = None
    with (
        Session.for_command(flags.requested_world, world) as session,
        as_user_errors(has_begun=lambda: trainer is not None and trainer.outcome.has_trained),
    ):
        SIGNALS.subscribe(lambda signum: session.coordinator.control_channel.request_stop(signum.name))
        cli = session.coordinator.run_on_all_ranks(lambda: RankzeroCLI(flags), "building data and model")
        session.title = cli.title
        trainer = build_trainer(cli, Trainer)
        try:
            trainer.fit(cli.model, datamodule=cli.datamodule)
        except Stopped as stopped:
            return stopped.exit_code
        return Exit.FINISHED


def build_trainer(cli: "RankzeroCLI", trainer_class: "type[Trainer]") -> "Trainer":
    """Builds the Trainer that the command line specifies. All ranks must call."""
    trainer = trainer_class(**cli.trainer_arguments)
    trainer.plan.data_batch_size = cli.data_batch_size
    if cli.config.fast == "yes" and trainer.precision == "bf16-mixed":
        cli.config.trainer.precision = trainer.precision
    trainer.config = cli.stored_config
    return trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default `sys.argv[1:]`, and returns its exit code."""
    return start(FIT, fit, arguments)
