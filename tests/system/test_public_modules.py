"""Modules in the style of public code: compared with stock Lightning, killed, resumed, evaluated and predicted."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.fabric.utilities.seed import seed_everything

from running import restore_process_state
from stock import differences
from system.forks import fit_on_ranks, outputs, summary
from system.public import FOLDER, MODULES, Module, copy_files, curves, result, train

RANKZERO_SCALARS = (
    *("train/loss", "train/mean_loss", "train/lr", "train/samples_per_second"),
    *("wall_time/", "weights/", "workload/", "world/", "x_axis/"),
)
"""Prefixes of the scalars that Rankzero adds to those of the module."""

CASES = [
    pytest.param(name, world, kill_at, marks=pytest.mark.soak if world > 1 or kill_at != module.kill_at else ())
    for name, module in MODULES.items()
    for world in (1, 2)
    for kill_at in range(module.kill_at - 1, module.kill_at + 2)
]


@pytest.fixture
def files(tmp_path) -> Path:
    return copy_files(tmp_path)


@pytest.mark.parametrize(("name", "world", "kill_at"), CASES)
def test_a_run_killed_in_mid_epoch_and_resumed_equals_an_uninterrupted_run(files, name, world, kill_at):
    module, tolerance = MODULES[name], 0.0 if world == 1 else 1e-6
    if module.size is not None:
        train(module, "whole", files, world)
    codes = train(module, "x", files, world, kill=kill_at)
    assert codes[0] == -9, outputs(files, world)
    saved = sorted((files / "runs/x/checkpoints").glob("step-*"))
    assert saved, "there was nothing to resume from"
    train(module, "x", files, world)
    resumed = summary(files, "x")
    assert (resumed["status"], resumed["attempts"], resumed["epochs"]) == ("finished", 2, 2)
    if module.size is not None:
        uninterrupted = summary(files, "whole")
        assert not differences(result(files, "whole"), result(files, "x"), tolerance)
        assert not differences(_logged(uninterrupted, module), _logged(resumed, module), tolerance)
        assert resumed["ledger"] == uninterrupted["ledger"]
    for split in ("val", "test"):
        fit_on_ranks("--run", "x", "--split", split, script="evaluate", folder=files, world=world)
        evaluated = json.loads((files / f"runs/x/evaluate-{split}.json").read_text())["metrics"]
        assert evaluated and all(value == value for value in evaluated.values())
    # A stream determines its order of samples, so the predictions of several ranks cannot be put in order.
    code = 2 if name == "stream" and world > 1 else 0
    fit_on_ranks("--name", "x", "--output", "predictions", script="predict", folder=files, world=world, code=code)
    assert code or json.loads((files / "predictions/predictions.json").read_text())


@pytest.mark.parametrize("name", MODULES)
def test_an_uninterrupted_run_equals_a_run_of_stock_lightning(files, name, monkeypatch):
    module = MODULES[name]
    monkeypatch.chdir(files)
    fixed = [text for key, value in module.fixed.items() for text in (f"--{key}", json.dumps(value).strip('"'))]
    seeded = ("--trainer.callbacks+=killing.SeedSteps",)  # stock loaders draw from the module's generator
    fit_on_ranks(*module.command, *fixed, *seeded, "--run", "ours", folder=files)
    expected = train_with_stock(module, files / "stock")
    assert not differences(expected, result(files, "ours"))
    stock_curves, found_curves = curves(files / "stock"), curves(files / "runs/ours/tensorboard")
    del stock_curves["epoch"]  # `x_axis/epoch` replaces it
    assert not differences(stock_curves, {tag: found_curves.get(tag) for tag in stock_curves})
    added = found_curves.keys() - stock_curves.keys()
    assert added and all(tag.startswith(RANKZERO_SCALARS) for tag in added), added


def train_with_stock(module: Module, log: Path) -> dict[str, Any]:
    """Trains a module with a stock Trainer, and returns the same states as `result`."""
    with restore_process_state(), user_code():
        seed_everything(0)
        data, model = _instance(module.data, module, "data"), _instance(module.model, module, "model")
        settings = {**module.stock, "callbacks": [_class("killing.SeedSteps")()]}
        settings |= {"max_epochs": 2, "log_every_n_steps": 10, "accelerator": "cpu", "devices": 1}
        settings["logger"] = lightning.pytorch.loggers.TensorBoardLogger(log, "", "", default_hp_metric=False)
        trainer = lightning.pytorch.Trainer(enable_progress_bar=False, enable_model_summary=False, **settings)
        trainer.fit(model, datamodule=data)
        return {
            "global_step": trainer.global_step,
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }


@contextmanager
def user_code() -> Iterator[None]:
    """Makes the files of tests/public importable, and removes them from `sys.modules` afterwards."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for file in FOLDER.glob("*.py"):
            sys.modules.pop(file.stem, None)


def _class(path: str) -> Any:
    name, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(name), attribute)


def _instance(path: str, module: Module, kind: str) -> Any:
    """Returns an instance with the fixed arguments of its kind, such as `data.shuffle`."""
    return _class(path)(**{key.split(".")[1]: value for key, value in module.fixed.items() if key.startswith(kind)})


def _logged(run_summary: dict[str, Any], module: Module) -> dict[str, float]:
    return {name: float(value) for name, value in run_summary["metrics"].items() if name not in module.list_metrics}
