"""Computes exact metrics of a run or a checkpoint on its validation or test split."""

import json
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from rankzero.checkpoints.atomic_files import write_text
from rankzero.checkpoints.manifest import newest_valid, read_manifest
from rankzero.checkpoints.write import export_weights
from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.world import World
from rankzero.messages import Exit, RequestError, as_user_errors, print_line
from rankzero.runs.directory import RunDirectory, expanded
from rankzero.runs.resume import requested_checkpoint
from rankzero.runs.stored_config import config_in, dump_config
from rankzero.show import terminal
from rankzero.show.run_list import unknown_run_error
from rankzero.text import finite_or_none
from rankzero.trainer import Trainer


def evaluate(flags: Arguments, world: World) -> int:
    """Evaluates a checkpoint, with each sample once, and returns the exit code. All ranks must call.

    Raises:
        CannotStart: The run or checkpoint does not exist, or cannot be evaluated as requested.
    """
    silence_warnings(world.rank)
    checkpoint = find_checkpoint(flags)
    if flags.only_prints:
        RankzeroCLI(with_stored_configuration(flags, checkpoint))  # prints and exits
    if flags.get("export"):
        if not world.rank:  # on rank zero only and without communication
            is_trusted, file = flags.get("trust_checkpoint") == "yes", expanded(flags.get("export"))
            print_line(f"rankzero: {export_weights(checkpoint, file, is_trusted)}")
        return Exit.FINISHED
    with Session.for_command(flags.requested_world, world) as session, as_user_errors(has_begun=lambda: False):
        cli, trainer, checkpoint = prepare(flags, session.coordinator)
        split = flags.get("split")
        metrics = run_split(trainer, cli, split, checkpoint)
        result = {"run": title_of(checkpoint), "checkpoint": str(checkpoint), "split": split}
        result |= {"samples": count_samples(trainer, split), "world_size": trainer.world_size}
        result["metrics"] = finite_or_none(metrics)
        file = output_path(flags, checkpoint, f"evaluate-{split}.json")
        session.coordinator.run_on_rank_zero(lambda: write_result(file, result))
        if trainer.global_rank == 0:
            terminal.print_evaluation({**result, "metrics": metrics}, file)
        return Exit.FINISHED


def prepare(flags: Arguments, coordinator: Coordinator) -> tuple[RankzeroCLI, Trainer, Path]:
    """Finds the checkpoint and builds the model, the data and the Trainer. All ranks must call.

    Raises:
        CannotStart: The run or checkpoint does not exist, or cannot be used as requested.
    """
    warnings.filterwarnings("ignore", message="The dirpath has changed from")  # an evaluation saves no checkpoint
    # While the run is training, each rank may find a different checkpoint, so all ranks use rank zero's.
    checkpoint = Path(coordinator.run_on_rank_zero(lambda: str(find_checkpoint(flags))))
    cli = coordinator.run_on_all_ranks(
        lambda: RankzeroCLI(with_stored_configuration(flags, checkpoint)), "building data and model"
    )
    trainer = Trainer(**{**cli.trainer_arguments, "logger": False, "enable_checkpointing": False})
    trainer.strategy.setup_environment()
    return cli, trainer, checkpoint


def find_checkpoint(flags: Arguments) -> Path:
    """Returns the requested checkpoint: `--checkpoint`, or the newest one of `--name` or of the newest run.

    Raises:
        RequestError: The checkpoint or the run does not exist.
    """
    requested, verb = flags.get("checkpoint"), flags.command.name
    if requested not in (None, "last", "best"):
        return requested_checkpoint(requested)
    root = expanded(flags.get("root"))
    names = [path.parent.name for path in sorted(root.glob("*/run.json"), key=lambda path: path.stat().st_mtime)]
    name = flags.get("name") or (names[-1] if names else "")
    if name not in names:
        asked = f"to {verb} --name {name}" if name else f"to {verb} the newest run"
        raise unknown_run_error(asked, name, root, f"python launch/{verb}.py --name {{}}")
    run = RunDirectory(root / name)
    if requested == "best":
        if best := run.read("summary.json").get("best"):
            return requested_checkpoint(str(run.path / best))
        instead = "--checkpoint last (to keep the best checkpoint of a run: fit.py --keep_best min:val/loss)"
        raise RequestError(f"the best checkpoint of run {run.name}", "the run kept no best checkpoint", instead)
    checkpoint, refused = newest_valid(run.checkpoints)
    if checkpoint is None:
        found = "\n".join([f"{root / name} has no complete checkpoint", *refused])
        raise RequestError(f"to {verb} --name {name}", found, "--name ANOTHER-NAME, or --checkpoint PATH")
    return checkpoint


def with_stored_configuration(flags: Arguments, checkpoint: Path) -> Arguments:
    """Returns the flags, preceded by the configuration of model and data that the checkpoint stores."""
    if not checkpoint.is_dir():
        return flags  # a .ckpt file has no stored configuration; --model and --data name the classes
    config = config_in(read_manifest(checkpoint))
    # A dict, as in `--data '{"class_path": ...}'`, replaces the stored section; a class path is merged into it.
    replaced = {name for name in ("model", "data") for token in flags.arguments if token.startswith(f"--{name}={{")}
    sections = [key for key in ("model", "data", "seed_everything") if key not in replaced]
    reused = {key: config[key] for key in sections if config.get(key) is not None}
    arguments = ["--config=" + dump_config(reused), *flags.arguments]
    name = f"the configuration stored in {checkpoint}"
    origins = flags.origins._replace(sources=[(name, reused), *flags.origins.sources], stored_source=name)
    explicitly_set = flags.explicitly_set | ({"data"} & config.keys())
    return flags._replace(arguments=arguments, explicitly_set=explicitly_set, origins=origins)


def run_split(trainer: Trainer, cli: RankzeroCLI, split: str, checkpoint: Path) -> dict[str, float]:
    """Runs the validation or the test split and returns its metrics. All ranks must call.

    Raises:
        RequestError: The module cannot evaluate this split.
    """
    steps = {"val": "validation_step", "test": "test_step"}
    possible = [other for other, step in steps.items() if is_overridden(step, cli.model)]
    if split not in possible:
        advice = f"--split {possible[0]}" if possible else f"the same command, after adding {steps[split]} to the class"
        raise RequestError(f"--split {split}", f"{type(cli.model).__name__} has no {steps[split]}", advice)
    run = trainer.validate if split == "val" else trainer.test
    results = run(cli.model, datamodule=cli.datamodule, ckpt_path=checkpoint, verbose=False, weights_only=None)
    return {name: value for result in results for name, value in sorted(result.items())}


def count_samples(trainer: Trainer, split: str) -> int | None:
    """Returns the number of samples evaluated on all ranks, within limits such as `--trainer.limit_test_batches`.

    Returns None if a loader has an order of its own, as with an IterableDataset, because its samples are not counted.
    """
    orders = trainer.plan.evaluation_orders
    limits = trainer.num_val_batches if split == "val" else trainer.num_test_batches
    if len(limits) != len(orders) or any(order.drawn for order in orders):
        return None
    return sum(order.samples_until(limit) for order, limit in zip(orders, limits, strict=True))


def title_of(checkpoint: Path) -> str:
    """Returns the name of the run, or of the checkpoint if it belongs to no run."""
    run = RunDirectory(checkpoint.parent.parent)
    return run.name if run.exists else checkpoint.name


def output_path(flags: Arguments, checkpoint: Path, name: str) -> Path:
    """Returns `--output`, or this name in the run's directory, or (without a run) a path in the current folder."""
    if flags.get("output"):
        return expanded(flags.get("output"))
    run = RunDirectory(checkpoint.parent.parent)
    return run.path / name if run.exists else Path(f"{checkpoint.name}-{name}")


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON.

    Raises:
        RequestError: The file cannot be written.
    """
    try:
        write_text(file, json.dumps(result, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise RequestError(f"--output {file}", str(error), "--output FILE, in a folder where you may write") from None
