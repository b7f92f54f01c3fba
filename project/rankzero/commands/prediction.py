"""Writes the outputs of `predict_step` for all samples of a split to files, in the order of the samples.

Each rank writes the outputs of a few batches at a time to part files; rank zero reads the parts one after the other.
A rank therefore keeps about `PART_BYTES` in memory, and rank zero one memory-mapped copy of the result.
"""

import csv
import dataclasses
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from rankzero.checkpoints.atomic_files import replacing, synced
from rankzero.cli.arguments import Arguments
from rankzero.cli.lightning_cli import RankzeroCLI
from rankzero.commands import evaluation
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.quiet import silence_warnings
from rankzero.distributed.world import World
from rankzero.messages import Exit, RequestError, as_user_errors, quoted
from rankzero.runs.resume import run_on_rank_zero
from rankzero.sampling.batch_sampler import EvaluationBatchSampler
from rankzero.sampling.loader import ManagedLoader
from rankzero.show import terminal

PART_BYTES = 64 * 2**20
"""Bytes of outputs after which a rank writes a part, and size from which a merged tensor is memory-mapped."""

MAX_COLUMNS = 64
"""Maximum number of columns of the CSV table; wider predictions get no table."""

PLAIN_TYPES = (str, int, float, bool, type(None))


class PartWriter:
    """Writes the outputs of one rank for one data loader to part files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.batches: list[tuple[list[int], Any]] = []
        self.buffered_bytes = self.part_count = 0

    def add(self, samples: Sequence[int], output: Any) -> None:
        """Adds the output of `predict_step` for these samples; writes a part once `PART_BYTES` are reached."""
        converted = as_plain(output)
        self.batches.append((list(samples), converted))
        self.buffered_bytes += sum(int(leaf.nbytes) if isinstance(leaf, Tensor) else 64 for leaf in leaves(converted))
        if self.buffered_bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the outputs added since the last part."""
        if self.batches:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.batches, self.folder / f"part-{self.rank:05d}-{self.part_count:05d}.pt")
        self.batches, self.buffered_bytes, self.part_count = [], 0, self.part_count + 1


def as_plain(output: Any) -> Any:
    """Converts an output to CPU tensors and plain types, which can be loaded without running code.

    Raises:
        RequestError: The output contains an object of another type.
    """
    if isinstance(output, Tensor):
        plain = output.detach().cpu()
        return plain.clone() if output.untyped_storage().nbytes() > output.nbytes else plain
    if isinstance(output, np.generic):
        return output.item()
    if isinstance(output, np.ndarray):
        return torch.from_numpy(output.copy()) if output.dtype.kind in "biuf" else as_plain(output.tolist())
    if type(output) in PLAIN_TYPES:
        return output
    if isinstance(output, Mapping):
        return {key if type(key) in PLAIN_TYPES else str(key): as_plain(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        return as_plain(output._asdict())
    if isinstance(output, list | tuple):
        values = list(map(as_plain, output))
        return tuple(values) if type(output) is tuple else values
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: as_plain(getattr(output, field.name)) for field in dataclasses.fields(output)}
    kind = f"{type(output).__module__}.{type(output).__qualname__}"
    found = f"it returned a {kind}, which runs code when it is loaded"
    instead = "a predict_step that returns tensors, numbers, strings, or lists, tuples and dicts of these"
    raise RequestError("to write the results of predict_step", found, instead)


def leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors and plain values of a nested structure."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from leaves(item)


def merge(folder: Path, file: Path) -> int:
    """Merges all parts of a data loader into one file.

    The file has the structure that `predict_step` returns, with one row for each sample of the data set. A row is an
    entry along the first dimension of a tensor, or an entry of a list. If the rows of a tensor differ in shape or dtype
    between batches, the result is a list of tensors.

    Returns:
        The number of samples.

    Raises:
        RequestError: An output does not have one row for each sample.
    """
    parts = sorted(folder.glob("part-*.pt"))
    batch_indices, outputs = [torch.zeros(0, dtype=torch.int64)], []
    for part in parts:
        for samples, output in torch.load(part, mmap=True, weights_only=True):
            batch_indices.append(torch.tensor(samples, dtype=torch.int64))
            outputs.append(output)
    indices = torch.cat(batch_indices)
    rows = torch.empty_like(indices)  # the row of each sample in the result
    rows[indices.argsort(stable=True)] = torch.arange(len(indices))
    batch_rows = rows.split([len(samples) for samples in batch_indices[1:]])
    merged = _Merger(folder, len(indices), batch_rows).merge(outputs, "the output") if outputs else None
    with replacing(file) as temporary, synced(temporary) as stream:
        torch.save(merged, stream)
    _write_table(merged, indices.sort().values, file.with_suffix(".csv"))
    for part in [*parts, *folder.glob("*.rows")]:
        part.unlink()
    return len(indices)


class _Merger:
    """Merges the outputs of all batches, given the rows of the samples of each batch in the result.

    The files that back memory-mapped tensors are in the folder.
    """

    def __init__(self, folder: Path, count: int, batch_rows: Sequence[Tensor]) -> None:
        self.folder, self.count, self.batch_rows = folder, count, batch_rows
        self.files = 0

    def merge(self, outputs: Sequence[Any], name: str) -> Any:
        """Merges one value of every batch; `name` is its name in error messages."""
        first = outputs[0]
        pairs = [(output, len(rows)) for output, rows in zip(outputs, self.batch_rows, strict=True)]
        if all(_is_batch(output, size) for output, size in pairs):
            return self._tensors(outputs)
        if all(output is None for output in outputs):
            return None
        if all(isinstance(output, dict) and output.keys() == first.keys() for output in outputs):
            return {key: self.merge([output[key] for output in outputs], f"{name}[{key!r}]") for key in first}
        same = all(type(output) is type(first) in (list, tuple) and len(output) == len(first) for output in outputs)
        if same and (type(first) is tuple or all(_is_batch(value, size) for output, size in pairs for value in output)):
            parts = [self.merge([output[i] for output in outputs], f"{name}[{i}]") for i in range(len(first))]
            return type(first)(parts)
        if all(isinstance(output, list | tuple) and len(output) == size for output, size in pairs):
            return self._rows(outputs)
        found = f"{name} of predict_step does not have one row per sample: {_description(first)}"
        instead = "a predict_step that returns tensors or lists with one row per sample of the batch"
        raise RequestError("predictions in the order of the samples", f"{found} for {pairs[0][1]} samples", instead)

    def _tensors(self, outputs: Sequence[Tensor]) -> Any:
        if len({(output.shape[1:], output.dtype) for output in outputs}) > 1:
            return self._rows([list(output) for output in outputs])
        result = self._empty((self.count, *outputs[0].shape[1:]), outputs[0].dtype)
        for rows, output in zip(self.batch_rows, outputs, strict=True):
            result[rows] = output
        return result

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor, memory-mapped from a file if it is large."""
        size = math.prod(shape)
        if size * dtype.itemsize < PART_BYTES:
            return torch.empty(shape, dtype=dtype)
        self.files += 1
        return torch.from_file(str(self.folder / f"{self.files}.rows"), shared=True, size=size, dtype=dtype).view(shape)

    def _rows(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        merged: list[Any] = [None] * self.count
        for rows, output in zip(self.batch_rows, outputs, strict=True):
            for row, value in zip(rows.tolist(), output, strict=True):
                merged[row] = value.clone() if isinstance(value, Tensor) else value
        return merged


def _is_batch(value: Any, size: int) -> bool:
    """Returns whether a value is a tensor with one row for each sample of the batch."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def _write_table(merged: Any, samples: Tensor, file: Path) -> None:
    """Writes a CSV file if the predictions are numbers and texts in at most `MAX_COLUMNS` columns."""
    columns = _columns(merged, "")
    if not columns or len(columns) > MAX_COLUMNS or any(len(values) != len(samples) for values in columns.values()):
        file.unlink(missing_ok=True)  # from an earlier prediction
        return
    with replacing(file) as temporary, temporary.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["sample", *columns])
        for begin in range(0, len(samples), 4096):
            parts = [values[begin : begin + 4096] for values in (samples, *columns.values())]
            table.writerows(zip(*(part.tolist() if isinstance(part, Tensor) else part for part in parts), strict=True))


def _columns(merged: Any, name: str) -> dict[str, Any] | None:
    """Returns column name -> one value for each sample; None if the predictions do not form a table."""
    if isinstance(merged, Tensor) and not merged.is_complex() and merged.ndim <= 2:
        if merged.ndim == 1:
            return {name or "prediction": merged}
        return {f"{name or 'prediction'}.{i}": merged[:, i] for i in range(merged.shape[1])[: MAX_COLUMNS + 1]}
    if isinstance(merged, dict | tuple) or (isinstance(merged, list) and any(isinstance(x, Tensor) for x in merged)):
        items = merged.items() if isinstance(merged, dict) else enumerate(merged)
        nested = [_columns(value, f"{name}.{key}" if name else str(key)) for key, value in items if value is not None]
        if any(columns is None for columns in nested):
            return None
        return {key: values for columns in nested for key, values in (columns or {}).items()}
    if isinstance(merged, list) and all(type(value) in PLAIN_TYPES for value in merged):
        return {name or "prediction": merged}
    return None


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
        RankzeroCLI(evaluation.with_stored_configuration(flags, evaluation.find_checkpoint(flags)))  # prints and exits
    with Session.for_command(flags.requested_world, world) as session, as_user_errors(has_begun=lambda: False):
        coordinator, rank = session.coordinator, session.world.rank
        cli, trainer, checkpoint = evaluation.prepare(flags, coordinator)
        coordinator.run_on_all_ranks(lambda: read_split(cli, flags.get("split")))
        name = "predictions" if flags.get("split") == "predict" else f"predictions-{flags.get('split')}"
        folder = evaluation.output_path(flags, checkpoint, name)
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
            samples = run_on_rank_zero(trainer.strategy, rank, lambda: _write_files(folder, len(callback.writers)))
        except BaseException:
            if rank == 0:
                shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
                with suppress(OSError):  # the folder contains other files
                    folder.rmdir()
            raise
        result = {"run": evaluation.title_of(checkpoint), "checkpoint": str(checkpoint), "split": flags.get("split")}
        result |= {"world_size": trainer.world_size, "samples": samples}
        coordinator.run_on_rank_zero(lambda: evaluation.write_result(folder / "predictions.json", result))
        if rank == 0:
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
        asked = " ".join(["predict", *map(quoted, cli.flags.origins.typed_arguments)])
        found = f"no {hook} in {' or '.join(type(owner).__name__ for owner in owners)}"
        raise RequestError(asked, found, f"--split {splits[0]}" if splits else f"a data module with a {hook}")
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
            order = f"a {type(own_order[0]).__name__} with its own sample order"
            found = f"{order}: which rank reads which sample is unknown"
            asked = f"predictions on {self.world_size} processes"
            raise RequestError(asked, found, "--devices 1, without a launcher")

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
