"""Keeps the results of Lightning's batch size and learning rate finders in a resumed run."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from rankzero.messages import RequestError, print_notice
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import names_set_by

FINDERS: dict[type[Callback], str] = {BatchSizeFinder: "batch size", LearningRateFinder: "learning rate"}


def is_tuning(trainer: Trainer) -> bool:
    """Returns whether a Tuner calls `fit`, which then only runs the trials of the Tuner's finder."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def check_batch_sizes(plan: SamplingPlan, callbacks: Sequence[Callback]) -> None:
    """Checks that only one flag or finder chooses the batch size.

    Raises:
        RequestError: Two flags, or a flag and a finder, choose the batch size.
    """
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

    Attributes:
        awaits_checkpoint: Whether the checkpoint that the run resumes from has not been restored yet.
        tuned: Names of the attributes that a Tuner has set before the run.
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
            for kind, setting in FINDERS.items():
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


def _found_settings(trainer: Trainer, module: LightningModule) -> dict[str, int | float]:
    """Returns the attributes that finders set -> their current values."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return _values(module, [name for callback in callbacks for name in names_set_by(callback, module)])


def _values(module: LightningModule, names: Iterable[str]) -> dict[str, int | float]:
    """Returns the attributes with these names that are numbers -> their values."""
    values: dict[str, Any] = {
        name: lightning_getattr(module, name) for name in names if lightning_hasattr(module, name)
    }
    return {name: value for name, value in values.items() if type(value) in (int, float)}
