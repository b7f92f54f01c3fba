"""Trains from the command line, with the data, the model and the Trainer that the flags specify."""

from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.distributed.world import World
from rankzero.messages import Exit, Stopped, as_user_errors
from rankzero.trainer import Trainer


def fit(flags: Arguments, world: World) -> int:
    """Trains a model or resumes its training. All ranks must call.

    Returns:
        The exit code, see `rankzero.messages.Exit`.

    Raises:
        CannotStart: The request cannot be fulfilled; nothing was trained and no file of the attempt remains.
    """
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
        trainer = build_trainer(cli)
        try:
            trainer.fit(cli.model, datamodule=cli.datamodule)
        except Stopped:
            return Exit.STOPPED
        return Exit.FINISHED


def build_trainer(cli: RankzeroCLI) -> Trainer:
    """Builds the Trainer that the command line specifies. All ranks must call."""
    trainer = Trainer(**cli.trainer_arguments)
    trainer.plan.data_batch_size = cli.data_batch_size
    if cli.config.fast == "yes" and trainer.precision == "bf16-mixed":
        cli.config.trainer.precision = trainer.precision
    trainer.config = cli.stored_config
    return trainer
