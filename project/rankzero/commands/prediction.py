"""What `predict_step` returns for each sample of a data module, in a file."""

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
from rankzero.commands.evaluation import find_checkpoint, prepare, title_of, with_configuration, write_result
from rankzero.commands.prediction_files import PartWriter, leaves, merge
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.rendezvous.client import RendezvousResult
from rankzero.distributed.session import Session
from rankzero.messages import Exit, RequestError, as_user_errors
from rankzero.runs import report
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import on_rank_zero
from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler
from rankzero.sampling.loader import ManagedLoader

STAGES = {"predict": "predict", "test": "test", "val": "validate"}
"""The value of `--split` -> the stage that a data module's `setup` gets."""

PARTS = ".parts"


def predict(flags: Arguments, rendezvous_result: RendezvousResult) -> int:
    """Writes what `predict_step` returns, each sample once, at any number of processes. All ranks must call.

    Returns:
        The exit code, see `rankzero.messages.Exit`.

    Raises:
        CannotStart: There is no such run or checkpoint, or nothing that can be predicted and written as asked.
    """
    silence_warnings(rendezvous_result.launch.rank or 0)
    if flags.only_prints:
        RankzeroCLI(with_configuration(flags, find_checkpoint(flags)))  # prints, and leaves
    with Session.of_command(flags.requested_world, rendezvous_result) as session, as_user_errors(begun=lambda: False):
        coordinator = session.coordinator
        cli, trainer, checkpoint = prepare(flags, coordinator)
        coordinator.run_on_all_ranks(lambda: read_split(cli, flags.get("split")))
        folder = output_folder(flags, checkpoint)
        coordinator.run_on_rank_zero(lambda: _clear(folder))
        kept = KeepPredictions(folder / PARTS, trainer.global_rank, trainer.world_size)
        trainer.callbacks.append(kept)
        settings: dict[str, Any] = {"ckpt_path": checkpoint, "return_predictions": False, "weights_only": None}
        try:
            trainer.predict(cli.model, datamodule=cli.datamodule, **settings)
            if not kept.writers:
                raise RequestError(f"--split {flags.get('split')}", "it has no samples", "another --split or --data")
            trainer.strategy.barrier("predictions")
            # Not `coordinator.run_on_rank_zero`, to which Ctrl-C is a failure: this may take minutes.
            samples = on_rank_zero(trainer.strategy, coordinator.launch.rank, lambda: _write(folder, len(kept.writers)))
        except BaseException:
            if coordinator.launch.rank == 0:
                _leave_nothing(folder)
            raise
        result = {"run": title_of(checkpoint), "checkpoint": str(checkpoint), "split": flags.get("split")}
        result |= {"world_size": trainer.world_size, "samples": samples}
        coordinator.run_on_rank_zero(lambda: write_result(folder / "predictions.json", result))
        if coordinator.launch.rank == 0:
            report.print_predictions(result, folder)
        return Exit.FINISHED


def read_split(cli: RankzeroCLI, split: str) -> None:
    """Has `Trainer.predict` read the samples of a split.

    Raises:
        RequestError: Neither the data module nor the model has a loader for them.
    """
    hook = f"{split}_dataloader"
    owners = [owner for owner in (cli.datamodule, cli.model) if owner is not None]
    with_loader = next((owner for owner in owners if is_overridden(hook, owner)), None)
    if with_loader is None:
        others = [name for name in STAGES if any(is_overridden(f"{name}_dataloader", owner) for owner in owners)]
        raise RequestError(
            f"--split {split}",
            f"neither {' nor '.join(type(owner).__name__ for owner in owners)} has a {hook}",
            f"--split {others[0]}" if others else f"a data module that has a {hook}",
        )
    owners[0].predict_dataloader = getattr(with_loader, hook)  # type: ignore[method-assign]
    if split != "predict":
        for owner in owners:
            _set_up_as(owner, STAGES[split])


def _set_up_as(owner: Any, stage: str) -> None:
    """Has Lightning's call of `setup` say another stage than `predict`."""
    setup = owner.setup

    def set_up(stage: str = stage, asked: str = stage) -> None:
        setup(asked)

    owner.setup = set_up


def output_folder(flags: Arguments, checkpoint: Path) -> Path:
    """Where predictions go: `--output`, or the run's directory; this folder for a checkpoint of no run."""
    if flags.get("output"):
        return Path(flags.get("output")).expanduser()
    run = RunDirectory(checkpoint.parent.parent)
    name = "predictions" if flags.get("split") == "predict" else f"predictions-{flags.get('split')}"
    return run.path / name if run.exists else Path(f"{checkpoint.name}-{name}")


def _clear(folder: Path) -> None:
    """Makes the folder, without the parts of a prediction that did not finish."""
    try:
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        (folder / PARTS).mkdir(parents=True)
    except OSError as error:
        raise RequestError(f"--output {folder}", str(error), "--output DIR, a folder you may write to") from None


def _write(folder: Path, loaders: int) -> dict[str, int]:
    """Writes one file for each data loader; returns how many samples are in each."""
    for old in folder.iterdir():
        if re.fullmatch(r"predictions(-\d+)?\.(pt|csv)", old.name):
            old.unlink()
    names = ["predictions.pt"] if loaders == 1 else [f"predictions-{i}.pt" for i in range(loaders)]
    samples = {name: merge(folder / PARTS / str(i), folder / name) for i, name in enumerate(names)}
    shutil.rmtree(folder / PARTS)
    return samples


def _leave_nothing(folder: Path) -> None:
    """Removes the parts of a prediction that failed, and the folder if there is nothing else in it."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


class KeepPredictions(Callback):
    """Keeps what `predict_step` returns.

    Args:
        folder: Where each rank writes its parts.
        rank: This rank.
        world_size: Ranks in all.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.writers: list[PartWriter] = []
        self.loaders: list[Any] = []
        self.read: list[int] = []
        """For each loader whose order is the user's own, how many samples were read."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        combined = trainer.predict_loop._combined_loader
        assert combined is not None
        self.loaders = combined.flattened
        self.writers = [PartWriter(self.folder / str(i), self.rank) for i in range(len(self.loaders))]
        self.read = [0] * len(self.loaders)
        unmanaged = [loader for loader in self.loaders if not isinstance(loader, ManagedLoader)]
        if unmanaged and self.world_size > 1:
            raise RequestError(
                f"predictions on {self.world_size} processes",
                f"a {type(unmanaged[0]).__name__} with an order of its own: which rank reads which sample is not known",
                "--devices 1, without a launcher",
            )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        samples = self._samples(outputs, batch_idx, dataloader_idx)
        if samples:
            self.writers[dataloader_idx].add(samples, outputs)

    def _samples(self, outputs: Any, batch_idx: int, dataloader_idx: int) -> list[int]:
        loader = self.loaders[dataloader_idx]
        if isinstance(loader, ManagedLoader):
            assert isinstance(loader.batch_sampler, EvaluationBatchSampler)
            return loader.batch_sampler.samples(batch_idx)
        begin = self.read[dataloader_idx]
        tensors = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.ndim]
        count = len(tensors[0]) if tensors else len(outputs) if isinstance(outputs, list | tuple) else 1
        self.read[dataloader_idx] += count
        return list(range(begin, begin + count))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for writer in self.writers:
            writer.flush()
