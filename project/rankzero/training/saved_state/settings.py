"""Callbacks that keep settings in a resumed run: of finders, of other callbacks, and of optimizers and schedules."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from torch import nn

from rankzero.distributed.torch_inside import set_last_rates
from rankzero.messages import RequestError, few, print_line, print_notice
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import averaging_in, batches_per_step_of, names_set_by
from rankzero.training.saved_state.module_state import group_names, prune_again, pruned_parameters

State = dict[str, Any]


def is_tuning(trainer: Trainer) -> bool:
    """Returns whether a Tuner calls `fit`, which then only runs the trials of the Tuner's finder."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def check_batch_sizes(plan: SamplingPlan, callbacks: Sequence[Callback]) -> None:
    """Raises a RequestError if two flags, or a flag and a finder, choose the batch size."""
    if plan.batch_size and plan.global_batch_size:
        requested = f"--batch_size {plan.batch_size} and --global_batch_size {plan.global_batch_size}"
        raise RequestError(requested, "both set the number of samples per step", "only one of the two")
    if not any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        return
    for flag in ("batch_size", "global_batch_size"):
        if (size := getattr(plan, flag)) is not None:
            raise RequestError(
                f"--{flag} {size} with a BatchSizeFinder",
                "both choose the batch size: the flag would override the result of the finder",
                f"the same command without --{flag} or without the finder",
            )


class KeepFound(LoopCallback):
    """Saves the attributes that finders set. A resumed run restores them and runs no finder at its start.

    Trials in a resumed run would find other values, and Lightning (2.6) would then start without the checkpoint.
    `awaits_checkpoint` is True until the checkpoint is restored; `tuned` names what a Tuner has set before the run.
    """

    def __init__(self) -> None:
        self.awaits_checkpoint = False
        self.tuned: set[str] = set()
        self._found_settings: dict[str, int | float] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        fit_loop_of(trainer).run_callbacks_and_loggers = trainer.callbacks, trainer.loggers  # type: ignore[attr-defined]
        self._found_settings = {}
        if is_tuning(trainer):
            self.tuned |= _found_settings(trainer, pl_module).keys()
        if not self.awaits_checkpoint:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kind, setting in ((BatchSizeFinder, "batch size"), (LearningRateFinder, "learning rate")):
                if isinstance(callback, kind) and type(callback).on_fit_start is kind.on_fit_start:
                    vars(callback).update(setup=_do_nothing, on_fit_start=_do_nothing)
                    if trainer.is_global_zero:
                        print_notice(f"{kind.__name__} does not run again: a resumed run keeps its {setting}")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if found := _found_settings(trainer, pl_module):
            checkpoint["found"] = found
        if self.tuned:
            checkpoint["tuned"] = _values(pl_module, self.tuned)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.awaits_checkpoint:  # a finder that undoes its trials also loads a checkpoint
            self._found_settings = checkpoint.get("found", {})
            for name in self.tuned & checkpoint.get("tuned", {}).keys():  # before optimizers are configured
                lightning_setattr(pl_module, name, checkpoint["tuned"][name])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the attributes in the hook in which finders set them: after optimizers are configured."""
        self.awaits_checkpoint = False
        for name, value in self._found_settings.items():
            if lightning_hasattr(pl_module, name):
                lightning_setattr(pl_module, name, value)


def _do_nothing(*arguments: Any, **settings: Any) -> None:
    """Replaces a finder's hook."""


def _found_settings(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Returns the attributes that finders set -> their current values."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return _values(module, [name for callback in callbacks for name in names_set_by(callback, module)])


def _values(module: LightningModule, names: Iterable[str]) -> dict[str, Any]:
    """Returns the attributes with these names that are numbers -> their values."""
    values = {name: lightning_getattr(module, name) for name in names if lightning_hasattr(module, name)}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


class LiveSettings(LoopCallback):
    """Saves and restores what callbacks have changed in the module and the Trainer, and no state dict contains.

    Lightning (2.6) calls `on_train_epoch_start` only at the beginning of an epoch. Settings that a callback changes
    there (unfrozen layers, batches per step, another schedule) are lost in a run that resumes within the epoch. If the
    callback changes them only once, they are lost after a resume in any later epoch too.
    """

    def __init__(self) -> None:
        self._flags: dict[str, bool] = {}
        self._batches_per_step = 1
        self._loaded: State = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded = {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the flags of a run that was only restored."""
        _set_flags(pl_module, self._loaded.get("flags", {}))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        flags = flags_of(pl_module)
        if trainer.state.stage is not RunningStage.TRAINING:  # in a validation, all modules are in eval mode
            flags = {name: value for name, value in flags.items() if not name.endswith(".training")}
        checkpoint["live_settings"] = {
            "flags": {name: value for name, value in flags.items() if value != self._flags.get(name, value)},
            "batches_a_step": [self._batches_per_step, batches_per_step_of(trainer)],
            "should_stop": trainer.should_stop and not fit_loop_of(trainer).can_stop_early,
            "groups": [group_names(pl_module, optimizer) for optimizer in trainer.optimizers],
        }
        if pruned := pruned_parameters(pl_module):
            checkpoint["pruned"] = pruned

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        kept = {name: checkpoint.get(name, {}) for name in ("pruned", "callbacks")}
        self._loaded = {**checkpoint.get("live_settings", {}), **kept}

    def on_ready(self, trainer: Trainer) -> None:
        module, loaded, self._loaded = trainer.lightning_module, self._loaded, {}
        self._flags, self._batches_per_step = flags_of(module), trainer.accumulate_grad_batches
        prune_again(module, loaded.get("pruned", {}))
        _set_flags(module, loaded.get("flags", {}))
        configured, batches = loaded.get("batches_a_step", (0, 0))
        if configured == self._batches_per_step:
            trainer.accumulate_grad_batches = batches
        trainer.should_stop |= loaded.get("should_stop", False)
        if not loaded or not fit_loop_of(trainer).is_within_epoch:
            return
        # In mid-epoch, StochasticWeightAveraging has to install its schedule, with the loaded state. It does so in
        # `on_train_epoch_start` (lightning 2.6), which never averages weights twice in an epoch.
        for callback in averaging_in(trainer):
            if loaded["callbacks"].get(callback.state_key, {}).get("scheduler_state") is not None:
                callback.on_train_epoch_start(trainer, module)


def flags_of(module: nn.Module) -> dict[str, bool]:
    """Returns the flags of all parameters and modules, by `NAME.requires_grad`, `NAME.training`, ..."""
    parameters = {f"{name}.requires_grad": owner.requires_grad for name, owner in module.named_parameters()}
    return parameters | {
        f"{name}.{flag}": getattr(owner, flag)
        for name, owner in module.named_modules()
        for flag in ("training", "track_running_stats")
        if isinstance(getattr(owner, flag, None), bool)
    }


def _set_flags(module: nn.Module, flags: Mapping[str, bool]) -> None:
    parameters, modules = dict(module.named_parameters()), dict(module.named_modules())
    for path, value in flags.items():
        name, _, flag = path.rpartition(".")
        owner = parameters.get(name) if flag == "requires_grad" else modules.get(name)
        if owner is not None:
            setattr(owner, flag, value)


_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "lr")


class OptimizerOverrides(LoopCallback):
    """Saves the configured settings of optimizers and schedules, and applies changed ones after a resume.

    A state dict of torch contains settings (learning rate, momentum) in addition to progress, so loading it restores
    the old settings.
    """

    def __init__(self) -> None:
        self._group_settings: list[list[State]] = []
        self._schedules: list[Any] = []
        self._schedule_settings: list[State] = []
        self._current: dict[str, list[Any]] = {}
        self._saved: dict[str, list[Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._saved = None

    def on_configured(self, trainer: Trainer) -> None:
        self._group_settings = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        self._schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedule_settings = [schedule.state_dict() for schedule in self._schedules]
        self._current = {
            "optimizers": [[_plain(group) for group in groups] for groups in self._group_settings],
            "schedules": [_plain(schedule) for schedule in self._schedule_settings],
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["configured"] = self._current

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get("configured")

    def on_ready(self, trainer: Trainer) -> None:
        saved, self._saved = self._saved, None
        if not saved:
            return
        for optimizer, *settings in zip(trainer.optimizers, saved["optimizers"], self._group_settings, strict=False):
            for group, old, new in zip(optimizer.param_groups, *settings, strict=False):
                _change_group(group, old, new)
        for schedule, old, new in zip(self._schedules, saved["schedules"], self._schedule_settings, strict=False):
            _change_schedule(schedule, old, new)
        named = [
            f"{key} {old[key]} -> {value}"
            for old, new in zip(_all_settings(saved), _all_settings(self._current), strict=False)
            for key, value in new.items()
            if key in (*_changed(old, new), "lr") and key != "initial_lr" and old.get(key, value) != value
        ]
        if named and trainer.is_global_zero:
            print_line(f"rankzero: changed in optimizers and schedules: {few(list(dict.fromkeys(named)))}")


def _all_settings(configured: dict[str, list[Any]]) -> list[State]:
    return [*chain(*configured["optimizers"]), *configured["schedules"]]


def _change_group(group: State, saved: State, current: State) -> None:
    group.update({key: current[key] for key in _changed(saved, _plain(current))})
    # A schedule has changed the rate since then, so the current rate is scaled by the ratio of the configured rates.
    before, after = (settings.get("initial_lr", settings.get("lr")) for settings in (saved, current))
    if before != after and before and after is not None:
        group["lr"] = group["lr"] * (after / before)


def _change_schedule(schedule: Any, saved: State, current: State) -> None:
    """Applies changed settings to a schedule; an object within the schedule is its state in `saved` and `current`."""
    for key in _changed(saved, _plain(current)):
        values = vars(schedule).get(key), saved[key], current[key]
        parts = zip(*(value if isinstance(value, list) else [value] for value in values), strict=False)
        objects = [part for part in parts if hasattr(part[0], "__dict__") and not isinstance(part[0], dict)]
        if not objects and (isinstance(values[0], dict) or not isinstance(current[key], dict)):
            setattr(schedule, key, current[key])
        for part, saved_part, current_part in objects:
            if isinstance(saved_part, dict) and isinstance(current_part, dict):
                _change_schedule(part, saved_part, current_part)
    if hasattr(schedule, "_last_lr") and hasattr(schedule, "optimizer"):
        set_last_rates(schedule)


def _changed(saved: State, current: State) -> list[str]:
    """Returns the names of the settings that differ, without those that record progress."""
    return [key for key in current if key not in _PROGRESS and key in saved and saved[key] != current[key]]


def _plain(settings: State | None) -> State:
    """Returns the settings that are plain types (numbers, strings, lists or dicts); {} for an object without state."""
    plain = {}
    for key, value in (settings or {}).items():
        with suppress(TypeError):
            plain[_as_plain(key)] = _as_plain(value)
    return plain


def _as_plain(value: Any) -> Any:
    """Returns a value as plain types; raises a TypeError for any other type."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # also converts subclasses, such as numpy.float64
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, dict):
        return _plain(value)
    raise TypeError(f"{type(value)} is not a plain type")
