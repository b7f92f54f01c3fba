"""Resolves `ckpt_path` of fit, validate, test and predict; `runs/resume.py` chooses where a fit resumes by default."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from rankzero.distributed.coordination.broadcast import broadcast_file
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.messages import RequestError
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import has_valid_manifest, newest_valid
from rankzero.runs.checkpoints.safe_load import signed_sha256_of
from rankzero.runs.directory import RunDirectory, expanded
from rankzero.runs.resume import requested_checkpoint
from rankzero.training.callbacks.checkpointing import CheckpointCallback
from rankzero.training.fit_loop import fit_loop_of


class ChosenCheckpoint(_CheckpointConnector):
    """Checkpoint connector that only loads the choice of `rankzero.runs.resume` or the checkpoint of `ckpt_path`.

    Without a path, Lightning (2.6) also searches for files of an OnExceptionCheckpoint or of a Slurm job.

    Args:
        trainer: The Trainer.
        run: The run whose checkpoints `last` and `best` refer to.
        checkpoint_callback: The checkpoint callback; None if checkpoints are disabled.
        coordinator: Sends rank zero's choice to all ranks.
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
        local_ranks = max(self.coordinator.launch.processes_per_node or (1,))
        io.read_once = partial(broadcast_file, device=strategy.root_device, local_ranks=local_ranks)
        try:
            super().resume_start(checkpoint_path, weights_only)
        finally:
            io.read_once = None

    def resolve(self, ckpt_path: str) -> str | None:
        """Returns the checkpoint that a `ckpt_path` refers to; None if there is no `last` one. All ranks must call.

        Raises:
            RequestError: There is no such checkpoint.
        """
        return self.coordinator.run_on_rank_zero(lambda: self._resolve(ckpt_path))

    def _resolve(self, ckpt_path: str) -> str | None:
        if ckpt_path in ("last", "hpc"):
            newest, _ = newest_valid(self.run.checkpoints)
            return str(newest) if newest else None
        if ckpt_path != "best":
            path = expanded(ckpt_path)
            return str(path if path.is_file() or has_valid_manifest(path) else requested_checkpoint(ckpt_path))
        candidates = [self.checkpoint_callback, *self.trainer.checkpoint_callbacks]
        best = next(filter(None, (getattr(callback, "best_model_path", "") for callback in candidates)), None)
        if best is None:
            raise RequestError(
                f"the best checkpoint of run {self.run.name}",
                "the run kept no best checkpoint",
                'ckpt_path="last" (to keep the best checkpoint of a run: keep_best="min:val/loss")',
            )
        return str(best)

    def _parse_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool
    ) -> str | None:
        if state_fn is TrainerFn.FITTING:
            return None if ckpt_path is None else str(ckpt_path)
        if ckpt_path is None:
            if model_provided or not (self.checkpoint_callback and self.checkpoint_callback.retention.best):
                return None
            ckpt_path = "best"
        path = self.resolve(str(ckpt_path))
        io = self.trainer.strategy.checkpoint_io
        if path is not None and isinstance(io, DirectoryCheckpointIO):
            io.trusted_sha256 = self.coordinator.run_on_rank_zero(lambda: signed_sha256_of(Path(path)))
        return path

    def restore(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Undoes a finder's trials by loading a file that this process wrote before them; the file is trusted.

        Lightning (2.6) would forget the checkpoint that the run resumes from, and start without it after the finder.
        """
        resumed = self._loaded_checkpoint, self._ckpt_path
        # After an error in its trials, the LearningRateFinder does not restore the run's callbacks and loggers.
        self.trainer.callbacks, self.trainer.loggers = fit_loop_of(self.trainer).run_callbacks_and_loggers  # type: ignore[attr-defined]
        super().restore(checkpoint_path, weights_only=False)
        self._loaded_checkpoint, self._ckpt_path = resumed
