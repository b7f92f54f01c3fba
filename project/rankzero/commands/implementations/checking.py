"""Runs a preflight from the command line, with the model, the data and the settings that the flags specify."""

from pathlib import Path

from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.world import World
from rankzero.messages import Exit, RequestError
from rankzero.preflight.all_checks import NetworkOptions, PlannedRun, check_all, thresholds
from rankzero.preflight.check import Report
from rankzero.runs.stored_config import flattened
from rankzero.sampling.generators import global_seed
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.speed import layout

_INSTEAD = "--json FILE, where FILE is in a folder in which you may write"


def run_checks(flags: Arguments, world: World, start_seconds: float, import_seconds: float) -> Exit:
    """Runs all checks, prints them and the verdict. All ranks must call.

    Returns:
        0 if all processes can train together, 1 if not.

    Raises:
        CannotStart: The request cannot be fulfilled, for example because the model does not exist.
    """
    silence_warnings(world.rank)
    if flags.only_prints:
        RankzeroCLI(flags)  # prints and exits
    with Session.for_command(flags.requested_world, world) as session:
        coordinator, world = session.coordinator, session.world
        file = Path(flags.get("json")) if flags.get("json") else None
        coordinator.run_on_rank_zero(lambda: _remove_old_result(file))
        cli = coordinator.run_on_all_ranks(lambda: RankzeroCLI(flags), "building data and model")
        plan = SamplingPlan(
            rank=coordinator.world.rank,
            world_size=world.size,
            seed=global_seed() or 0,
            batch_size=flags.get("batch_size"),
            global_batch_size=flags.get("global_batch_size"),
            data_batch_size=cli.data_batch_size,
            micro_batches=cli.config.trainer.accumulate_grad_batches,
            max_device_batch_size=flags.get("max_device_batch_size"),
        )
        precision = cli.config.trainer.precision
        if coordinator.broadcast_object(flags.get("fast")) == "yes":
            precision, _ = layout.agree_on_precision(coordinator, world.accelerator, precision)
            layout.apply_layout(cli.model, world.accelerator)
        config, root = flattened(cli.stored_config), Path(flags.get("root"))
        trainer = cli.config.trainer
        settings = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps, "precision": precision}
        run = PlannedRun(cli.model, cli.datamodule, plan, config, root, flags.get("keep"), settings)
        options = NetworkOptions(flags.get("pairs"), flags.get("warn_gbps"), flags.get("fail_gbps"))
        report = Report(coordinator.world.rank == 0, file, thresholds(options))
        coordinator.share_peers()
        return check_all(session, run, options, report, start_seconds, import_seconds)


def _remove_old_result(file: Path | None) -> None:
    """Removes the result of an earlier preflight, which is not the result of this one, and checks that it is writable.

    Raises:
        RequestError: The file cannot be written.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.touch()
        file.unlink()
    except OSError as error:
        raise RequestError(f"--json {file}", f"the file cannot be written: {error.strerror}", _INSTEAD) from None
