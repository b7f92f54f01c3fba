"""Puts the Trainer together: world, strategy, environment, checkpoint format, callbacks."""

import sys
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, ProgressBar
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from rankzero.distributed.coordinator import Team
from rankzero.distributed.devices import World
from rankzero.distributed.environments.cluster import LaunchEnvironment
from rankzero.messages import RequestError
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.sampling.plan import Sharding
from rankzero.training import fit_loop as loops
from rankzero.training.callbacks.found_settings import KeepFound
from rankzero.training.callbacks.learning_rate import LearningRate
from rankzero.training.callbacks.progress import BarProgress, PlainProgress
from rankzero.training.callbacks.sample_ledger import KeepLedger
from rankzero.training.callbacks.stop import NoSignals
from rankzero.training.callbacks.throughput import Throughput
from rankzero.training.metrics import logged as logged_metrics
from rankzero.training.saved_state.live_settings import LiveSettings
from rankzero.training.saved_state.optimizer_overrides import ConfiguredSettings
from rankzero.training.saved_state.rank_states import RankStates
from rankzero.training.strategies import DataParallel, OneProcess

UNUSED_PARAMETERS = {
    "auto": False,
    "ddp": False,
    "ddp_find_unused_parameters_false": False,
    "ddp_find_unused_parameters_true": True,
}
"""The values of --trainer.strategy -> whether DDP looks for parameters that a step did not use."""


def build_trainer(
    arguments: dict[str, Any], world: World, team: Team, sharding: Sharding, trusted: bool = False
) -> Trainer:
    """Builds the Trainer of a run, or of an evaluation. It knows nothing yet of the run's directory.

    Args:
        arguments: `--trainer.*`, instantiated.
        world: How many processes there are, and on what.
        team: All processes, and where this one stands.
        sharding: How samples are shared among them.
        trusted: Whether a checkpoint may hold what can run any code.

    Raises:
        RequestError: `--trainer.strategy` is one that cannot keep the run's promises, or a flag and a BatchSizeFinder
            both choose the batch size.
    """
    checkpoint_io = DirectoryCheckpointIO(trusted)
    _check_finders(_as_list(arguments["callbacks"]), sharding)
    arguments = {
        **arguments,
        "accelerator": world.accelerator,
        "devices": 1 if world.accelerator == "cpu" else [world.index],
        "num_nodes": world.nodes,
        "strategy": _strategy(arguments["strategy"], world, team, sharding),
        "plugins": [*_as_list(arguments["plugins"]), checkpoint_io, LaunchEnvironment(team.launch)],
        "callbacks": [KeepLedger(sharding), *_as_list(arguments["callbacks"]), *_callbacks(arguments, sharding)],
        "use_distributed_sampler": False,  # project.sampling shares the samples
        "logger": False,  # the logger and our checkpoints come with the run's directory, see rankzero.runs.attempt
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in _as_list(arguments["callbacks"])),
        "enable_model_summary": bool(arguments["enable_model_summary"]),
    }
    trainer = Trainer(**arguments)
    trainer.callbacks.insert(0, KeepFound())  # type: ignore[attr-defined]  # Lightning puts finders before all others
    trainer._signal_connector = NoSignals(trainer)
    trainer._checkpoint_connector = ChosenCheckpoint(trainer)
    loops.install(trainer, sharding)
    logged_metrics.install(trainer)
    return trainer


class ChosenCheckpoint(_CheckpointConnector):
    """Carries on from what `rankzero.runs.resume` has chosen, and from nothing else.

    Lightning (2.6) looks around where it is given none: for what an OnExceptionCheckpoint left, or a Slurm job.
    """

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *arguments: Any, **settings: Any) -> Any:
        return None if ckpt_path is None else super()._parse_ckpt_path(state_fn, ckpt_path, *arguments, **settings)

    def restore(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Undoes a finder's trials, from a file that this process wrote before them.

        Lightning (2.6) forgets what it had loaded to resume from, and starts from nothing where a finder ran meanwhile.
        """
        resumed = self._loaded_checkpoint, self._ckpt_path
        # After an error in its trials, the LearningRateFinder leaves its own callbacks in place of the run's.
        self.trainer.callbacks, self.trainer.loggers = loops.fit_loop_of(self.trainer).outside_trials  # type: ignore[attr-defined]
        super().restore(checkpoint_path, weights_only=False)
        self._loaded_checkpoint, self._ckpt_path = resumed


def _strategy(asked: Any, world: World, team: Team, sharding: Sharding) -> Strategy:
    if not isinstance(asked, str) or asked not in UNUSED_PARAMETERS:
        raise RequestError(
            f"--trainer.strategy {asked}",
            "a strategy for which the order of samples is not known to be right",
            f"--trainer.strategy {' or '.join(list(UNUSED_PARAMETERS)[:2])}, or ddp_find_unused_parameters_true",
        )
    device = torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else world.accelerator
    if world.size == 1:
        return OneProcess(sharding, device=device)
    unused = UNUSED_PARAMETERS[asked]
    return DataParallel(sharding, team, process_group_backend=world.backend, find_unused_parameters=unused)


def _check_finders(callbacks: list[Callback], sharding: Sharding) -> None:
    if not any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        return
    for flag in ("batch_size", "global_batch_size"):
        if (size := getattr(sharding, flag)) is not None:
            raise RequestError(
                f"--{flag} {size} with a BatchSizeFinder",
                "both choose the batch size: the flag would win over whatever the finder finds",
                f"the same command without --{flag}, or without the finder",
            )


def _callbacks(arguments: dict[str, Any], sharding: Sharding) -> list[Callback]:
    callbacks: list[Callback] = [
        Throughput(sharding),
        LearningRate(),
        RankStates(sharding.seed, sharding.rank, sharding.world_size),
        ConfiguredSettings(),
        LiveSettings(),
    ]
    has_bar = any(isinstance(callback, ProgressBar) for callback in _as_list(arguments["callbacks"]))
    if arguments["enable_progress_bar"] is not False and not has_bar:
        callbacks.append(BarProgress() if sys.stdout.isatty() else PlainProgress())
    return callbacks


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def callback_of(trainer: Trainer, kind: type[Callback]) -> Any:
    """The trainer's callback of a kind that it is known to have."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, kind))
