"""Resolves `ckpt_path` of fit, validate, test and predict; `runs/resume.py` chooses where a fit resumes by default."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import file_of, has_valid_manifest, newest_valid
from rankzero.checkpoints.safe_load import is_remote, signed_sha256_of
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.process_group import broadcast_file
from rankzero.messages import RequestError, print_notice
from rankzero.runs.directory import RunDirectory, expanded
from rankzero.runs.resume import NoCheckpointError, existing_url, requested_checkpoint
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.lightning_inside import CheckpointConnector


class ChosenCheckpoint(CheckpointConnector):
    """Checkpoint connector that only loads the choice of `rankzero.runs.resume` or the checkpoint of `ckpt_path`.

    Without a path, Lightning (2.6) also searches for files of an OnExceptionCheckpoint or of a Slurm job.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunDirectory,
        checkpoint_callback: CheckpointCallback | None,
        coordinator: Coordinator,
    ) -> None:
        super().__init__(trainer)
        self.run, self.checkpoint_callback, self.coordinator = run, checkpoint_callback, coordinator

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Loads a checkpoint on all ranks. If memory suffices, rank zero reads it and sends it to the other ranks."""
        io, strategy = self.trainer.strategy.checkpoint_io, self.trainer.strategy
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not isinstance(io, DirectoryCheckpointIO) or not has_group:
            super().resume_start(checkpoint_path, weights_only)
            return
        local_ranks = max(self.coordinator.world.launch.processes_per_node or (1,))
        io.read_once = partial(broadcast_file, device=strategy.root_device, local_ranks=local_ranks)
        try:
            super().resume_start(checkpoint_path, weights_only)
        finally:
            io.read_once = None

    def resolve(self, ckpt_path: str, state_fn: TrainerFn = TrainerFn.FITTING) -> str | None:
        """Returns the checkpoint that a `ckpt_path` refers to; None if there is no `last` one. All ranks must call.

        Another one that does not exist raises a RequestError.
        """
        named: dict[str, Callable[[TrainerFn], str | None]] = {"best": self._best, "last": self._last, "hpc": self._hpc}

        def find() -> str | list[str] | None:
            try:
                if ckpt_path in named:
                    return named[ckpt_path](state_fn)
                if is_remote(ckpt_path):
                    return existing_url(ckpt_path)
                path = expanded(ckpt_path)
                return str(path if path.is_file() or has_valid_manifest(path) else requested_checkpoint(ckpt_path))
            except NoCheckpointError as error:
                return list(error.args)

        found = self.coordinator.run_on_rank_zero(find)
        if not isinstance(found, list):
            return found
        error = NoCheckpointError(*found)  # of the same class on all ranks
        error.reported_elsewhere = not self.trainer.is_global_zero
        raise error

    def _best(self, state_fn: TrainerFn) -> str:
        """Returns the best checkpoint of the Trainer's first ModelCheckpoint, as Lightning does."""
        candidates = filter(None, [*self.trainer.checkpoint_callbacks, self.checkpoint_callback])
        paths = [callback.best_model_path for callback in candidates if hasattr(callback, "best_model_path")]
        if paths and paths[0]:
            return str(paths[0])
        found = "no best checkpoint was saved" if paths else "the Trainer has no checkpoint callback"
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            found = "fast_dev_run saves no checkpoints"
        instead = "the path of a checkpoint as ckpt_path"
        if state_fn is not TrainerFn.FITTING:
            instead += f", or trainer.{state_fn.value}(model) for the model as it is"
        raise RequestError(f"{state_fn.value} with the best checkpoint", found, instead)

    def _last(self, state_fn: TrainerFn) -> str | None:
        """Returns the last checkpoint of the user's callbacks, if any, otherwise of the run; to fit, the newer one.

        It is the run's after a `fit` that an earlier start of the script has finished: a later one replaces the others.
        """
        newest, _ = newest_valid(self.run.checkpoints, self.run.part)
        own = str(file_of(newest).absolute()) if newest else None
        with warnings.catch_warnings():
            if own:
                warnings.simplefilter("ignore")  # Lightning warns if the callbacks have saved no last checkpoint
            users = super()._parse_ckpt_path(state_fn, "last", True, True)
        if own is None or users is None or fit_loop_of(self.trainer).only_restores:
            return own or (str(users) if users else None)
        if state_fn is not TrainerFn.FITTING:
            return str(users)
        return max(str(users), own, key=lambda path: get_filesystem(path).modified(path))

    def _hpc(self, state_fn: TrainerFn) -> str:
        """Returns the newest `hpc_ckpt_N.ckpt` in `default_root_dir`; Lightning saves it when Slurm requeues a job."""
        try:
            return str(super()._parse_ckpt_path(state_fn, "hpc", True, True))
        except ValueError:
            found = f"{self.trainer.default_root_dir} contains no hpc_ckpt_N.ckpt"
            raise RequestError('ckpt_path="hpc"', found, 'ckpt_path="last", or the path of a checkpoint') from None

    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        if state_fn is TrainerFn.FITTING:
            return ckpt_path  # of `Trainer.fit`, which has resolved it
        if ckpt_path is None and model_provided:
            return None
        path = self.resolve(str(ckpt_path or "best"), state_fn)
        if path is not None and self.trainer.is_global_zero:
            print_notice(f"{state_fn.value} uses the checkpoint {path}")
        io = self.trainer.strategy.checkpoint_io
        if path is not None and isinstance(io, DirectoryCheckpointIO):
            io.trusted_sha256 = self.coordinator.run_on_rank_zero(lambda: signed_sha256_of(Path(path)))
        return as_given(path, ckpt_path)

    def restore(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Undoes a finder's trials by loading a file that this process wrote before them; the file is trusted.

        Lightning (2.6) would forget the checkpoint that the run resumes from, and start without it after the finder.
        """
        resumed = self._loaded_checkpoint, self._ckpt_path
        # After an error in its trials, the LearningRateFinder does not restore the run's callbacks and loggers.
        self.trainer.callbacks, self.trainer.loggers = fit_loop_of(self.trainer).run_callbacks_and_loggers  # type: ignore[attr-defined]
        super().restore(checkpoint_path, weights_only=False)
        self._loaded_checkpoint, self._ckpt_path = resumed


def as_given(checkpoint: Path | str | None, ckpt_path: object) -> Path | str | None:
    """Returns the file of a checkpoint for `trainer.ckpt_path`: a Path if the user gave a Path, otherwise text."""
    if isinstance(checkpoint, Path):
        checkpoint = str(file_of(checkpoint))
    return Path(checkpoint) if checkpoint and isinstance(ckpt_path, Path) else checkpoint
