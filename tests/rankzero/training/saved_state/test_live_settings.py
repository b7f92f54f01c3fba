import pytest
from resuming import fit_in, fit_stock

from stock import differences

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
