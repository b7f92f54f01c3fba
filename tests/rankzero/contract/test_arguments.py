"""Compares each argument of stock Lightning's Trainer with the same argument of `rankzero.Trainer`."""

import inspect
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from contract import compare, loader


@dataclass
class Case:
    """A value of an argument, or a function that returns one, and other arguments of the same Trainer."""

    value: Any
    settings: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)


KINDS = (callbacks.Checkpoint, callbacks.ModelSummary, callbacks.ProgressBar, callbacks.Timer)
SHUFFLE, STRATEGY, FILES = "`shuffle=True`", "any strategy", "files lie in"
GROUP, DEFAULTS = "the loss of a short last group", "Lightning's progress bar"
SAVES = {"saves": DEFAULTS, "evaluated saves": DEFAULTS}
"""Starts of rows in the table of differences."""


def stop_at_step_3(trainer, *_):
    trainer.should_stop = trainer.global_step >= 3


STOPS = {"callbacks": callbacks.LambdaCallback(on_train_batch_end=stop_at_step_3), "max_epochs": 4}
CASES = {
    "accelerator": [Case("cpu"), Case("auto"), Case(CPUAccelerator), Case("gpu"), Case("abacus")],
    "strategy": [
        *(Case(value, {"use_distributed_sampler": False}) for value in ("ddp", "DDP")),
        Case(lambda: DDPStrategy(find_unused_parameters=True), {"use_distributed_sampler": False}),
        Case(lambda: SingleDeviceStrategy("cpu"), differs={"": STRATEGY}), Case("fsdp"), Case("abacus"),
    ],
    "devices": [Case(1), Case("auto"), Case("1"), Case([0]), Case(0), Case(-1)],
    "num_nodes": [Case(1)],
    "precision": [Case("64-true"), Case("bf16-mixed"), Case(64), Case("bf16"), Case("32-true"), Case("33")],
    "logger": [
        Case(True, differs={"files": FILES}), Case(None, differs={"files": FILES}),
        Case(lambda: CSVLogger("csv")), Case(lambda: [CSVLogger("csv"), CSVLogger("b")]),
    ],
    "callbacks": [
        Case(lambda: callbacks.EarlyStopping("val", patience=0, min_delta=9.0), {"max_epochs": 9}),
        Case(lambda: [ModelCheckpoint("kept", monitor="val", save_top_k=2)], {"enable_checkpointing": True}, SAVES),
        Case(lambda: [ModelCheckpoint("kept", every_n_train_steps=3)], {"enable_checkpointing": None}, SAVES),
        Case(lambda: [ModelCheckpoint("kept")]),
        Case(lambda: [callbacks.LearningRateMonitor("step")], {"logger": lambda: CSVLogger("csv")}),
    ],
    "fast_dev_run": [Case(True), Case(2), Case(True, {"logger": None, "enable_checkpointing": None})],
    "max_epochs": [Case(1), Case(0), Case(-1, {"max_steps": 8}), Case(None, {"max_steps": 8})],
    "min_epochs": [Case(2, STOPS)],
    "max_steps": [Case(7), Case(0), Case(3, {"accumulate_grad_batches": 2})],
    "min_steps": [Case(8, STOPS)],
    "max_time": [Case(timedelta(0)), Case("00:00:00:00"), Case({"seconds": 0}), Case({"hours": 1})],
    "limit_train_batches": [Case(2), Case(0.5), Case(0), Case(1), Case(1.0), Case(99)],
    "limit_val_batches": [Case(2), Case(0.5), Case(0)],
    "limit_test_batches": [Case(2), Case(0.5), Case(0)],
    "limit_predict_batches": [Case(2), Case(0.5), Case(0)],
    "overfit_batches": [Case(2), Case(0.5)],
    "val_check_interval": [
        Case(2), Case(0.5), Case(4, {"check_val_every_n_epoch": None}), Case(99),
        Case(timedelta(0)), Case("00:00:00:00"),
    ],
    "check_val_every_n_epoch": [Case(2), Case(None, {"val_check_interval": 8})],
    "num_sanity_val_steps": [Case(0), Case(1), Case(-1)],
    "log_every_n_steps": [Case(1), Case(3), Case(0)],
    "enable_checkpointing": [Case(value, differs={"files": FILES}) for value in (True, None)],
    "enable_progress_bar": [Case(True)],
    "enable_model_summary": [Case(True)],
    "accumulate_grad_batches": [Case(2), Case(4, differs={"": GROUP})],
    "gradient_clip_val": [Case(0.01), Case(0.01, {"accumulate_grad_batches": 2})],
    "gradient_clip_algorithm": [Case("value", {"gradient_clip_val": 0.01}), Case("norm", {"gradient_clip_val": 0.01})],
    "deterministic": [Case(True), Case("warn")],
    "benchmark": [Case(True), Case(False)],
    "inference_mode": [Case(False)],
    "use_distributed_sampler": [Case(False)],
    "profiler": [Case("simple"), Case("advanced"), Case(lambda: SimpleProfiler("profiles", "mine")), Case("abacus")],
    "detect_anomaly": [Case(True)],
    "barebones": [
        Case(True, {"logger": None, "enable_checkpointing": None, "log_every_n_steps": None}),
        Case(True, {"logger": True}), Case(True, {"enable_checkpointing": True}),
    ],
    "plugins": [
        Case(LightningEnvironment), Case(lambda: [TorchCheckpointIO()]),
        Case(lambda: [AsyncCheckpointIO()]), Case(DoublePrecision),
        Case(lambda: AsyncCheckpointIO(TorchCheckpointIO())),
    ],
    "sync_batchnorm": [Case(True), Case(True, {"strategy": "ddp"}, {"": "`sync_batchnorm=True`"})],
    "reload_dataloaders_every_n_epochs": [Case(1)],
    "default_root_dir": [Case("elsewhere", {"logger": None, "enable_checkpointing": None}, {"files": FILES})],
    "enable_autolog_hparams": [Case(False, {"logger": lambda: CSVLogger("csv")})],
    "model_registry": [Case("mine")],
}  # fmt: skip
PARAMETERS = [
    pytest.param(name, case, id=f"{name}-{number}")
    for name in list(inspect.signature(pl.Trainer.__init__).parameters)[1:]
    for number, case in enumerate(CASES.get(name, [None]))
]


def use(script, settings):
    """Trains, validates, tests and predicts."""
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    trainer = script.call("trainer", script.trainer, **settings)
    if isinstance(trainer, str):
        return
    net = script.net()
    script.call("fit", trainer.fit, net, loader(), loader(8))
    script.note_state(trainer, net)
    for stage in ("validate", "test", "predict"):
        script.call(stage, getattr(trainer, stage), net, loader(8))
    script.note_state(trainer, net, "evaluated ")
    script.note(files=script.files())
    kinds = {kind for kind in KINDS if any(isinstance(callback, kind) for callback in trainer.callbacks)}
    script.note(callbacks={kind.__name__ for kind in kinds}, folder=trainer.default_root_dir)


@pytest.mark.parametrize(("name", "case"), PARAMETERS)
def test_an_argument_of_the_trainer_does_what_it_does_in_lightning(tmp_path, name, case):
    assert case, f"Lightning's Trainer has the argument {name}: add it to CASES"
    compare(use, tmp_path, {name: case.value, **case.settings}, differs=case.differs)


def test_every_argument_still_exists():
    assert CASES.keys() <= inspect.signature(pl.Trainer.__init__).parameters.keys()
