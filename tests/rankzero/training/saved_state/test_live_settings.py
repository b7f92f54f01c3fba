"""Lightning's callbacks: a run that is stopped and resumed ends bit-identical to an uninterrupted run."""

import pytest
from resuming import fit_in, fit_stock, same

pytestmark = pytest.mark.usefixtures("finders_without_gc")


def callback(name, **settings):
    own = name if "." in name else f"lightning.pytorch.callbacks.{name}"
    flags = tuple(f"--trainer.callbacks.{key}={value}" for key, value in settings.items())
    return f"--trainer.callbacks+={own}", *flags


SWA = callback("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=3)
LATE_SWA = callback("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=3, annealing_strategy="linear")
SCHEDULE = ("--model.schedule=true",)
PRUNING = {"pruning_fn": "l1_unstructured", "amount": 0.3}
CASES = {
    "SWA": SWA,
    "SWA in the place of a schedule": SCHEDULE + LATE_SWA,
    "SWA with batch norm": ("--model.norm=true", *SWA),
    "SWA with extra state": ("--model.extra_state=true", *SWA),
    "EMA": callback("EMAWeightAveraging", decay=0.8, update_every_n_steps=2),
    "averaging of epochs": callback("WeightAveraging"),
    "accumulation": callback("GradientAccumulationScheduler", scheduling="{0: 1, 1: 4, 3: 2}"),
    "learning rate finder": SCHEDULE + callback("LearningRateFinder", num_training_steps=30),
    "batch size finder": (
        *("--model.batch_size=4", "--model.samples=256"),
        *callback("BatchSizeFinder", max_trials=4, init_val=4),
    ),
    "both finders": (
        *("--model.batch_size=4", "--model.samples=256"),
        *callback("BatchSizeFinder", max_trials=4, init_val=4),
        *callback("LearningRateFinder", num_training_steps=30),
    ),
    "learning rate finder in a later epoch": callback("resuming.FindRateLater", num_training_steps=30),
    "batch size finder in a later epoch": callback("resuming.FindSizeLater", max_trials=3, init_val=4),
    "pruning": callback("ModelPruning", **PRUNING),
    "pruning with masks in checkpoints": callback(
        "ModelPruning", **PRUNING, make_pruning_permanent="false", use_lottery_ticket_hypothesis="false"
    ),
    "backbone": SCHEDULE + callback("BackboneFinetuning", unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.001),
    "finetuning": ("--model.norm=true", *callback("resuming.Thaw")),
    "thawed by hand": callback("resuming.ThawByHand"),
    "timer": callback("Timer", duration="{hours: 9}"),
    "early stopping": callback("EarlyStopping", monitor="val", patience=1, stopping_threshold=100, mode="min")
    + ("--trainer.min_epochs=3",),
    "model checkpoint": callback("ModelCheckpoint", dirpath="own", monitor="val", save_top_k=2, save_last="true"),
    "SWA and accumulation": SWA + callback("GradientAccumulationScheduler", scheduling="{0: 2, 2: 4}"),
    "EMA and finetuning": callback("resuming.Thaw") + callback("EMAWeightAveraging", decay=0.8),
}


STOPS = (3, 12, 15)
"""Steps after which a run stops: in the first epoch, and in the middle and just before the end of the second epoch."""


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_identical_to_an_uninterrupted_run(tmp_path, case):
    whole = fit_in(tmp_path / "whole", *CASES[case])
    last = whole["summary"]["steps"] - 1
    resumed = fit_in(tmp_path / "resumed", *CASES[case], stops=[step for step in STOPS if step < last])
    for key in ("record", "weights", "saved weights", "callbacks"):
        assert same(whole[key], resumed[key], key) == []
    assert same(dict(sorted(whole["weights"].items())), dict(sorted(whole["saved weights"].items()))) == []
    for key in ("epochs", "steps", "samples", "metrics", "ledger"):
        assert whole["summary"][key] == resumed["summary"][key]
    assert [line.split(":")[0] for line in whole["summary"]["ledger"]] == [
        f"epoch {number}" for number in range(1, whole["summary"]["epochs"] + 1)
    ]
    for key in ("optimizer_states", "lr_schedulers", "state_dict"):
        assert same(whole["state"][key], resumed["state"][key], key) == []


STOCK_FAILS = {
    "timer": "LightningCLI cannot write its defaults",
    "batch size finder in a later epoch": "trains on no batch in that epoch and those after it",
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in STOCK_FAILS])
def test_callbacks_have_the_same_effect_as_in_stock_lightning(tmp_path, case):
    plain = ("--model.shuffle=false", "--model.dropout=0")  # stock loaders draw from the global generators
    ours, stock = fit_in(tmp_path / "ours", *CASES[case], *plain), fit_stock(tmp_path / "stock", *CASES[case], *plain)
    for key in ("record", "weights"):
        assert same(ours[key], stock[key], key) == []


def test_weights_replaced_at_the_end_are_saved_but_not_trained_further(tmp_path):
    exchanges = ("--trainer.callbacks+=resuming.ZeroAtTheEnd",)
    whole = fit_in(tmp_path / "whole", *exchanges)
    half = fit_in(tmp_path / "half", *exchanges, "--epochs", "2")
    assert all(not value.any() for value in half["saved weights"].values())
    longer = fit_in(tmp_path / "half", *exchanges)
    assert same(whole["record"], longer["record"]) == []
    assert all(not value.any() for value in longer["saved weights"].values())
