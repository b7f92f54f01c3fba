"""Writes the outputs of `predict_step` for all samples of a split to files."""

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.commands.evaluation import (
    find_checkpoint,
    output_path,
    prepare,
    title_of,
    with_stored_configuration,
    write_result,
)
from rankzero.commands.prediction_files import PartWriter, leaves, merge
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.world import World
from rankzero.messages import Exit, RequestError, as_user_errors, quoted
from rankzero.runs.resume import run_on_rank_zero
from rankzero.sampling.batch_sampler import EvaluationBatchSampler
from rankzero.sampling.loader import ManagedLoader
from rankzero.show import terminal

STAGES = {"predict": "predict", "test": "test", "val": "validate"}
"""The value of `--split` -> the stage that `setup` receives."""

PARTS_FOLDER = ".parts"


def predict(flags: Arguments, world: World) -> int:
    """Writes the outputs of `predict_step`, each sample once, and returns the exit code. All ranks must call.

    Raises:
        CannotStart: The run, the checkpoint or the split does not exist, or the predictions cannot be written.
    """
    silence_warnings(world.rank)
    if flags.only_prints:
        RankzeroCLI(with_stored_configuration(flags, find_checkpoint(flags)))  # prints and exits
    with Session.for_command(flags.requested_world, world) as session, as_user_errors(has_begun=lambda: False):
        coordinator = session.coordinator
        cli, trainer, checkpoint = prepare(flags, coordinator)
        coordinator.run_on_all_ranks(lambda: read_split(cli, flags.get("split")))
        name = "predictions" if flags.get("split") == "predict" else f"predictions-{flags.get('split')}"
        folder = output_path(flags, checkpoint, name)
        coordinator.run_on_rank_zero(lambda: _prepare_folder(folder))
        callback = KeepPredictions(folder / PARTS_FOLDER, trainer.global_rank, trainer.world_size)
        trainer.callbacks.append(callback)
        settings: dict[str, Any] = {"ckpt_path": checkpoint, "return_predictions": False, "weights_only": None}
        try:
            trainer.predict(cli.model, datamodule=cli.datamodule, **settings)
            if not callback.writers:
                raise RequestError(f"--split {flags.get('split')}", "it has no samples", "another --split or --data")
            trainer.strategy.barrier("predictions")
            # This may take minutes, and `coordinator.run_on_rank_zero` would treat Ctrl-C as a failure.
            samples = run_on_rank_zero(
                trainer.strategy, coordinator.world.rank, lambda: _write_files(folder, len(callback.writers))
            )
        except BaseException:
            if coordinator.world.rank == 0:
                shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
                with suppress(OSError):  # the folder contains other files
                    folder.rmdir()
            raise
        result = {"run": title_of(checkpoint), "checkpoint": str(checkpoint), "split": flags.get("split")}
        result |= {"world_size": trainer.world_size, "samples": samples}
        coordinator.run_on_rank_zero(lambda: write_result(folder / "predictions.json", result))
        if coordinator.world.rank == 0:
            terminal.print_predictions(result, folder)
        return Exit.FINISHED


def read_split(cli: RankzeroCLI, split: str) -> None:
    """Makes `Trainer.predict` read the samples of a split.

    Raises:
        RequestError: Neither the data module nor the model has a loader for the split.
    """
    hook = f"{split}_dataloader"
    owners = [owner for owner in (cli.datamodule, cli.model) if owner is not None]
    owner_with_loader = next((owner for owner in owners if is_overridden(hook, owner)), None)
    if owner_with_loader is None:
        splits = [name for name in STAGES if any(is_overridden(f"{name}_dataloader", owner) for owner in owners)]
        raise RequestError(
            " ".join(["predict", *map(quoted, cli.flags.origins.typed_arguments)]),
            f"no {hook} in {' or '.join(type(owner).__name__ for owner in owners)}",
            f"--split {splits[0]}" if splits else f"a data module with a {hook}",
        )
    owners[0].predict_dataloader = getattr(owner_with_loader, hook)  # type: ignore[method-assign]
    if split != "predict":
        for owner in owners:  # Lightning's call of `setup` passes `predict`
            owner.setup = lambda stage="", setup=owner.setup: setup(STAGES[split])  # type: ignore[method-assign]


def _prepare_folder(folder: Path) -> None:
    """Creates the folder and removes the parts of an unfinished prediction."""
    try:
        shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
        (folder / PARTS_FOLDER).mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"--output {folder}", str(error), "--output DIR, a folder where you may write") from None


def _write_files(folder: Path, loader_count: int) -> dict[str, int]:
    """Writes one file for each data loader; returns file name -> number of samples."""
    for old_file in folder.iterdir():
        if re.fullmatch(r"predictions(-\d+)?\.(pt|csv)", old_file.name):
            old_file.unlink()
    names = ["predictions.pt"] if loader_count == 1 else [f"predictions-{i}.pt" for i in range(loader_count)]
    samples = {name: merge(folder / PARTS_FOLDER / str(i), folder / name) for i, name in enumerate(names)}
    shutil.rmtree(folder / PARTS_FOLDER)
    return samples


class KeepPredictions(Callback):
    """Callback that writes the outputs of `predict_step` to part files."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.writers: list[PartWriter] = []
        self.loaders: list[Any] = []
        self.read_counts: list[int] = []
        """Number of samples read from each loader; counted only for loaders that keep the user's order."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        combined = trainer.predict_loop._combined_loader
        assert combined is not None
        self.loaders = combined.flattened
        self.writers = [PartWriter(self.folder / str(i), self.rank) for i in range(len(self.loaders))]
        self.read_counts = [0] * len(self.loaders)
        own_order = [one for one in self.loaders if not isinstance(one, ManagedLoader) or one.batch_sampler.drawn]
        if own_order and self.world_size > 1:
            raise RequestError(
                f"predictions on {self.world_size} processes",
                f"a {type(own_order[0]).__name__} with its own sample order: which rank reads which sample is unknown",
                "--devices 1, without a launcher",
            )

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if samples := self._samples(outputs, batch_idx, dataloader_idx):
            self.writers[dataloader_idx].add(samples, outputs)

    def _samples(self, outputs: Any, batch_idx: int, dataloader_idx: int) -> list[int]:
        loader = self.loaders[dataloader_idx]
        if isinstance(loader, ManagedLoader):
            assert isinstance(loader.batch_sampler, EvaluationBatchSampler)
            return loader.batch_sampler.samples(batch_idx)
        begin = self.read_counts[dataloader_idx]
        tensors = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.ndim]
        count = len(tensors[0]) if tensors else len(outputs) if isinstance(outputs, list | tuple) else 1
        self.read_counts[dataloader_idx] += count
        return list(range(begin, begin + count))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in self.writers:
            writer.flush()
