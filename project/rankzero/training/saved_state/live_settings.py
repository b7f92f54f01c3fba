"""Settings that callbacks change during training and that no state dict contains.

Lightning (2.6) calls `on_train_epoch_start` only at the beginning of an epoch. Settings that a callback changes there
(unfrozen layers, batches per step, another schedule) are lost in a run that resumes within the epoch. If the callback
changes them only once, they are lost after a resume in any later epoch too.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from torch import nn

from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import batches_per_step_of
from rankzero.training.saved_state.module_state import group_names, prune_again, pruned_parameters

State = dict[str, Any]

MODULE_FLAGS = ("training", "track_running_stats")


class LiveSettings(LoopCallback):
    """Saves and restores the settings of the module, the Trainer and the schedule that callbacks have changed."""

    def __init__(self) -> None:
        self._flags: dict[str, bool] = {}
        self._batches_per_step = 1
        self._loaded: State | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the flags of a run that was only restored."""
        _set_flags(pl_module, (self._loaded or {}).get("flags", {}))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        flags = flags_of(pl_module)
        if trainer.state.stage is not RunningStage.TRAINING:  # in a validation, all modules are in eval mode
            flags = {name: value for name, value in flags.items() if not name.endswith(".training")}
        checkpoint["live_settings"] = {
            "flags": {name: value for name, value in flags.items() if value != self._flags.get(name, value)},
            "batches_a_step": [self._batches_per_step, _batches_per_step(trainer)],
            "should_stop": trainer.should_stop and not fit_loop_of(trainer).can_stop_early,
            "groups": [group_names(pl_module, optimizer) for optimizer in trainer.optimizers],
        }
        if pruned := pruned_parameters(pl_module):
            checkpoint["pruned"] = pruned

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        kept = {name: checkpoint.get(name, {}) for name in ("pruned", "callbacks")}
        self._loaded = {**checkpoint.get("live_settings", {}), **kept}

    def on_ready(self, trainer: Trainer) -> None:
        module, loaded = trainer.lightning_module, self._loaded or {}
        self._loaded = None
        self._flags, self._batches_per_step = flags_of(module), trainer.accumulate_grad_batches
        prune_again(module, loaded.get("pruned", {}))
        _set_flags(module, loaded.get("flags", {}))
        configured, batches = loaded.get("batches_a_step", (0, 0))
        if configured == self._batches_per_step:
            trainer.accumulate_grad_batches = batches
        trainer.should_stop |= loaded.get("should_stop", False)
        if loaded and fit_loop_of(trainer).is_within_epoch:
            _resume_averaging(trainer, loaded["callbacks"])


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Returns the flags of all parameters and modules, by `NAME.requires_grad`, `NAME.training`, ..."""
    parameters = {f"{name}.requires_grad": owner.requires_grad for name, owner in module.named_parameters()}
    return parameters | {
        f"{name}.{flag}": getattr(owner, flag)
        for name, owner in module.named_modules()
        for flag in MODULE_FLAGS
        if isinstance(getattr(owner, flag, None), bool)
    }


def _averaging(trainer: Trainer) -> list[StochasticWeightAveraging]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, StochasticWeightAveraging)]


def _set_flags(module: nn.Module, flags: Mapping[str, bool]) -> None:
    parameters, modules = dict(module.named_parameters()), dict(module.named_modules())
    for path, value in flags.items():
        name, _, flag = path.rpartition(".")
        owner = parameters.get(name) if flag == "requires_grad" else modules.get(name)
        if owner is not None:
            setattr(owner, flag, value)


def _batches_per_step(trainer: Trainer) -> int:
    """Returns the batches per step, not the value that StochasticWeightAveraging sets for an epoch without steps."""
    for callback in _averaging(trainer):
        if (batches := batches_per_step_of(callback)) is not None:
            return batches
    return int(trainer.accumulate_grad_batches)


def _resume_averaging(trainer: Trainer, loaded: Mapping[str, Any]) -> None:
    """Makes StochasticWeightAveraging install its schedule, with the loaded state, in the middle of an epoch.

    The callback does this in `on_train_epoch_start` (lightning 2.6), which never averages weights twice in an epoch.
    """
    for callback in _averaging(trainer):
        if loaded.get(callback.state_key, {}).get("scheduler_state") is not None:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
