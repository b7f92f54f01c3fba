"""Settings that finders, callbacks, optimizers and schedules have are the same in a resumed run."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.tuner.lr_finder import _LRFinder
from resuming import Net, fit_in, fit_stock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim import lr_scheduler as schedules

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.saved_state.settings import OptimizerOverrides
from rankzero.training.strategies import OneProcess
from running import fit_in_process, train_in_process
from stock import QUIET, differences, saves_to

pytestmark = pytest.mark.usefixtures("finders_without_gc")


def callback_flags(name, **settings):
    path = name if "." in name else f"lightning.pytorch.callbacks.{name}"
    flags = tuple(f"--trainer.callbacks.{key}={value}" for key, value in settings.items())
    return f"--trainer.callbacks+={path}", *flags


SWA = callback_flags("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=3)
LATE_SWA = callback_flags("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=3, annealing_strategy="linear")
SCHEDULE = ("--model.schedule=true",)
PRUNING = {"pruning_fn": "l1_unstructured", "amount": 0.3}
RANDOM = ("--model.dropout=0.1", "--model.shuffle=true")
LARGE = ("--model.batch_size=4", "--model.samples=256")
RATE_FINDER = callback_flags("LearningRateFinder", num_training_steps=30)
SIZE_FINDER = callback_flags("BatchSizeFinder", max_trials=4, init_val=4)
CASES = {
    "SWA with batch norm": ("--model.norm=true", *SWA),
    "SWA in the place of a schedule": SCHEDULE + LATE_SWA,
    "SWA with extra state": ("--model.extra_state=true", *SWA),
    "EMA": callback_flags("EMAWeightAveraging", decay=0.8, update_every_n_steps=2),
    "averaging of epochs": callback_flags("WeightAveraging"),
    "accumulation": callback_flags("GradientAccumulationScheduler", scheduling="{0: 1, 1: 4, 3: 2}"),
    "learning rate finder in a later epoch": callback_flags("resuming.FindRateLater", num_training_steps=30),
    "pruning": callback_flags("ModelPruning", **PRUNING, use_lottery_ticket_hypothesis="false"),
    "pruning with masks in checkpoints": callback_flags(
        "ModelPruning", **PRUNING, make_pruning_permanent="false", use_lottery_ticket_hypothesis="false"
    ),
    "backbone": SCHEDULE
    + callback_flags("BackboneFinetuning", unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.001),
    "finetuning": ("--model.norm=true", *callback_flags("resuming.Thaw")),
    "thawed by hand": callback_flags("resuming.ThawByHand"),
    "early stopping": callback_flags("EarlyStopping", monitor="val", patience=1, stopping_threshold=100, mode="min")
    + ("--trainer.min_epochs=3",),
    "model checkpoint": callback_flags("ModelCheckpoint", dirpath="own", monitor="val", save_top_k=2, save_last="true"),
    "SWA and accumulation": SWA + callback_flags("GradientAccumulationScheduler", scheduling="{0: 2, 2: 4}"),
    "EMA and finetuning": callback_flags("resuming.Thaw") + callback_flags("EMAWeightAveraging", decay=0.8),
}
"""Arguments of runs that equal runs of stock Lightning."""
RANDOM_CASES = {
    "SWA": SWA,
    "learning rate finder": SCHEDULE + RATE_FINDER,
    "batch size finder": LARGE + SIZE_FINDER,
    "both finders": LARGE + SIZE_FINDER + RATE_FINDER,
    "batch size finder in a later epoch": callback_flags("resuming.FindSizeLater", max_trials=3, init_val=4),
    "timer": callback_flags("Timer", duration="{hours: 9}"),
}
"""Arguments of runs that draw random numbers, as stock loaders and dropout do from the same generators.

`test_found_settings.py` compares the finders with stock Lightning, which trains on no batch after a batch size finder
in a later epoch. LightningCLI cannot write the defaults of a Timer.
"""
STOPS = (3, 12, 15)
"""Steps after which a run stops: in the first epoch, and in the middle and just before the end of the second epoch."""


@pytest.mark.parametrize("case", [*CASES, *RANDOM_CASES])
def test_stopped_and_uninterrupted_runs_are_identical_to_stock_lightning(tmp_path, case):
    arguments = CASES.get(case) or RANDOM + RANDOM_CASES[case]
    uninterrupted = fit_in(tmp_path / "whole", *arguments)
    if case in CASES:
        stock = fit_stock(tmp_path / "stock", *arguments)
        assert differences({key: uninterrupted[key] for key in stock}, stock) == []
    last = uninterrupted["summary"]["steps"] - 1
    resumed = fit_in(tmp_path / "resumed", *arguments, stops=[step for step in STOPS if step < last])
    for key in ("record", "weights", "saved weights", "callbacks"):
        assert differences(uninterrupted[key], resumed[key]) == []
    trained, saved = (dict(sorted(uninterrupted[key].items())) for key in ("weights", "saved weights"))
    assert differences(trained, saved) == []
    for key in ("epochs", "steps", "samples", "metrics", "ledger"):
        assert uninterrupted["summary"][key] == resumed["summary"][key]
    epochs = range(1, uninterrupted["summary"]["epochs"] + 1)
    assert [line.split(":")[0] for line in uninterrupted["summary"]["ledger"]] == [f"epoch {epoch}" for epoch in epochs]
    for key in ("optimizer_states", "lr_schedulers"):
        assert differences(uninterrupted["state"][key], resumed["state"][key]) == []


def test_weights_replaced_at_the_end_are_saved_but_not_trained_further(tmp_path):
    arguments = ("--trainer.callbacks+=resuming.ZeroAtTheEnd", *RANDOM)
    uninterrupted = fit_in(tmp_path / "whole", *arguments)
    stopped = fit_in(tmp_path / "half", *arguments, "--epochs", "2")
    assert all(not value.any() for value in stopped["saved weights"].values())
    resumed = fit_in(tmp_path / "half", *arguments)
    assert differences(uninterrupted["record"], resumed["record"]) == []
    assert all(not value.any() for value in resumed["saved weights"].values())


SIZE = ("--trainer.callbacks+=BatchSizeFinder", "--trainer.callbacks.max_trials=5")
RATE = ("--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=30")
DATA = ("--model.samples=160",)


def files(folder):
    """Returns the paths of a run's files, without event files (named after time and process) and step numbers."""
    paths = {path.relative_to(folder) for path in folder.rglob("*") if "events.out" not in path.name}
    return {str(path).replace(path.name, "step") if path.name.startswith("step-") else str(path) for path in paths}


@pytest.mark.parametrize("finders", [SIZE, RATE, SIZE + RATE], ids=["batch size", "rate", "both"])
def test_trials_do_not_count_and_found_settings_are_used(tmp_path, finders):
    run = fit_in(tmp_path / "ours", *finders, *DATA)
    stock = fit_stock(tmp_path / "stock", *finders, *DATA)
    assert differences(run["record"], stock["record"]) == []
    assert differences(run["weights"], stock["weights"]) == []
    summary = run["summary"]
    size = 32 if finders[0] == SIZE[0] else 8
    assert (summary["samples"], summary["steps"]) == (4 * 160, 4 * 160 // size)
    assert summary["ledger"] == [f"epoch {number}: 160 of 160 samples, each once" for number in range(1, 5)]
    curves = EventAccumulator(str(tmp_path / "ours/runs/x/tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("loss_epoch")][-1] == summary["steps"] - 1
    assert curves.Scalars("train/lr")[0].value == pytest.approx(run["record"][0]["rates"][0])
    fit_in(tmp_path / "plain", *DATA, f"--model.batch_size={size}")
    differing_files = files(tmp_path / "ours") ^ files(tmp_path / "plain")
    assert all("checkpoints/step" in name for name in differing_files), differing_files


@pytest.mark.parametrize("finder", [SIZE, RATE], ids=["batch size", "rate"])
def test_error_in_a_trial_fails_the_run(cwd, finder, monkeypatch):
    monkeypatch.setattr(Net, "training_step", lambda self, batch, batch_idx: {}["no such layer"])
    with pytest.raises(KeyError, match="no such layer"):
        fit_in_process("--model", "resuming.Net", "--run", "x", *finder)
    assert json.loads(Path("runs/x/summary.json").read_text())["status"] == "failed"
    assert "no such layer" in Path("runs/x/logs/rank-000.log").read_text()
    assert not list(cwd.glob(".*.ckpt"))


def request_stop_in_trial(self, batch, batch_idx):
    """Requests one stop, in the third batch of a trial."""
    loop = fit_loop_of(self.trainer)
    if loop.is_trial and batch_idx == 2 and not Path("asked").exists():
        Path("asked").touch()
        loop.extra_subscribers[-1].control_channel.request_stop("a test")
    return self.loss(batch)


@pytest.mark.parametrize("finder", [SIZE, RATE], ids=["batch size", "rate"])
def test_run_stopped_in_a_trial_saves_nothing_and_restarts(cwd, finder, monkeypatch):
    monkeypatch.setattr(Net, "training_step", request_stop_in_trial)
    steps = ("--trainer.callbacks.steps_per_trial=6",) if finder == SIZE else ()
    command = ("--model", "resuming.Net", "--run", "x", "--epochs", "1", *finder, *steps)
    assert fit_in_process(*command) == 75
    assert not list(Path("runs/x/checkpoints").glob("*")) and not list(cwd.glob(".*"))
    assert fit_in_process(*command) == 0
    assert json.loads(Path("runs/x/summary.json").read_text())["samples"] == 64


@pytest.mark.parametrize("flag", ["--batch_size", "--global_batch_size"])
def test_batch_size_flag_with_a_batch_size_finder_is_refused(cwd, flag):
    with pytest.raises(RequestError, match=f"{flag} 16 with a BatchSizeFinder"):
        fit_in_process("--model", "resuming.Net", *SIZE, flag, "16")
    assert not list(cwd.iterdir())


def test_a_finder_added_to_a_resumed_run_does_not_run(cwd, capsys):
    command = ("--model", "resuming.Net", "--run", "x")
    fit_in_process(*command, "--epochs", "1")
    fit_in_process(*command, "--epochs", "2", *RATE)
    assert "LearningRateFinder does not run again: a resumed run keeps its learning rate" in capsys.readouterr().out
    (newest,) = Path("runs/x/checkpoints").glob("step-00000016")
    assert torch.load(newest / "state.pt", weights_only=True)["optimizer_states"][0]["param_groups"][0]["lr"] == 0.05


def test_a_resumed_run_keeps_what_a_tuner_found_before_its_first_start(script_folder, monkeypatch):
    for epochs, found in ((1, 0.03), (2, 0.07)):
        monkeypatch.setattr(_LRFinder, "suggestion", lambda self, found=found: found)
        trainer, model = Trainer(name="x", max_epochs=epochs, **QUIET), Net(samples=160)
        Tuner(trainer).lr_find(model, num_training=30)
        trainer.fit(model)
        assert model.lr == 0.03


class Model(BoringModel):
    def __init__(self, make_schedule, **settings):
        super().__init__()
        self.make_schedule, self.settings = make_schedule, settings

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **{"lr": 0.1, "momentum": 0.9, **self.settings})
        return [optimizer], [self.make_schedule(optimizer)] if self.make_schedule else []


def train_and_get_group(tmp_path, schedule, epochs, resume=None, **settings):
    model, file = Model(schedule, **settings), tmp_path / f"{epochs}.ckpt"
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}
    limits |= {"max_epochs": epochs, "strategy": OneProcess(SamplingPlan(), device="cpu")}
    train_in_process(OptimizerOverrides(), saves_to(file), model=model, loops=True, resume=resume, **limits)
    return model.trainer.optimizers[0].param_groups[0], file


SCHEDULES = {
    "none": None,
    "step": lambda optimizer: schedules.StepLR(optimizer, step_size=2, gamma=0.5),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=10),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_changed_setting_is_used_and_the_schedule_continues_in_proportion(tmp_path, schedule):
    uninterrupted, _ = train_and_get_group(tmp_path, schedule, 5)
    _, file = train_and_get_group(tmp_path, schedule, 2)
    resumed, _ = train_and_get_group(tmp_path, schedule, 5, resume=file)
    assert resumed["lr"] == pytest.approx(uninterrupted["lr"], rel=1e-12)
    halved, _ = train_and_get_group(tmp_path, schedule, 5, resume=file, lr=0.05, momentum=0.5)
    assert halved["momentum"] == 0.5 and resumed["momentum"] == 0.9
    assert halved["lr"] == pytest.approx(uninterrupted["lr"] / 2, rel=1e-12)


class Warmup:
    def __init__(self, steps):
        self.steps, self.maximum = steps, torch.ones(())  # a plain value and a tensor

    def __call__(self, epoch):
        return min(float(self.maximum), (epoch + 1) / self.steps)


def sequential(optimizer, decay):
    parts = [schedules.LambdaLR(optimizer, Warmup(2)), schedules.StepLR(optimizer, 1, gamma=decay)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


NESTED = {
    "phases": (lambda optimizer, steps: schedules.OneCycleLR(optimizer, 0.1, total_steps=steps), 4, 8),
    "milestones": (lambda optimizer, milestone: schedules.MultiStepLR(optimizer, [milestone]), 3, 9),
    "an object": (lambda optimizer, steps: schedules.LambdaLR(optimizer, Warmup(steps)), 3, 9),
    "an object within": (lambda optimizer, n: schedules.CyclicLR(optimizer, 0.1, 0.2, 2, scale_fn=Warmup(n)), 3, 9),
    "within another": (sequential, 0.5, 0.1),
}
"""Schedule with one setting, and the setting before and after a change."""


@pytest.mark.parametrize("kind", NESTED)
def test_changed_settings_nested_in_a_schedule_are_used(tmp_path, kind):
    schedule, old, new = NESTED[kind]
    before, after = (lambda optimizer: schedule(optimizer, old)), (lambda optimizer: schedule(optimizer, new))
    _, file = train_and_get_group(tmp_path, before, 2)
    for make_schedule, epochs in ((after, 5), (before, 4)):
        uninterrupted, _ = train_and_get_group(tmp_path, make_schedule, epochs)
        resumed, _ = train_and_get_group(tmp_path, make_schedule, epochs, resume=file)
        assert resumed["lr"] == pytest.approx(uninterrupted["lr"], rel=1e-12)
    assert torch.load(file, weights_only=True)["configured"]["schedules"]
