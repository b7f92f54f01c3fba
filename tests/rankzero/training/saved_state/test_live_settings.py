"""Lightning's callbacks: a run that is stopped and resumed ends bit-identical to an uninterrupted run."""

import pytest
from resuming import differences, fit_in, fit_stock

pytestmark = pytest.mark.usefixtures("finders_without_gc")


def callback_flags(name, **settings):
    path = name if "." in name else f"lightning.pytorch.callbacks.{name}"
    flags = tuple(f"--trainer.callbacks.{key}={value}" for key, value in settings.items())
    return f"--trainer.callbacks+={path}", *flags


SWA = callback_flags("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=3)
LATE_SWA = callback_flags("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=3, annealing_strategy="linear")
SCHEDULE = ("--model.schedule=true",)
PRUNING = {"pruning_fn": "l1_unstructured", "amount": 0.3}
CASES = {
    "SWA": SWA,
    "SWA in the place of a schedule": SCHEDULE + LATE_SWA,
    "SWA with batch norm": ("--model.norm=true", *SWA),
    "SWA with extra state": ("--model.extra_state=true", *SWA),
    "EMA": callback_flags("EMAWeightAveraging", decay=0.8, update_every_n_steps=2),
    "averaging of epochs": callback_flags("WeightAveraging"),
    "accumulation": callback_flags("GradientAccumulationScheduler", scheduling="{0: 1, 1: 4, 3: 2}"),
    "learning rate finder": SCHEDULE + callback_flags("LearningRateFinder", num_training_steps=30),
    "batch size finder": (
        *("--model.batch_size=4", "--model.samples=256"),
        *callback_flags("BatchSizeFinder", max_trials=4, init_val=4),
    ),
    "both finders": (
        *("--model.batch_size=4", "--model.samples=256"),
        *callback_flags("BatchSizeFinder", max_trials=4, init_val=4),
        *callback_flags("LearningRateFinder", num_training_steps=30),
    ),
    "learning rate finder in a later epoch": callback_flags("resuming.FindRateLater", num_training_steps=30),
    "batch size finder in a later epoch": callback_flags("resuming.FindSizeLater", max_trials=3, init_val=4),
    "pruning": callback_flags("ModelPruning", **PRUNING),
    "pruning with masks in checkpoints": callback_flags(
        "ModelPruning", **PRUNING, make_pruning_permanent="false", use_lottery_ticket_hypothesis="false"
    ),
    "backbone": SCHEDULE
    + callback_flags("BackboneFinetuning", unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.001),
    "finetuning": ("--model.norm=true", *callback_flags("resuming.Thaw")),
    "thawed by hand": callback_flags("resuming.ThawByHand"),
    "timer": callback_flags("Timer", duration="{hours: 9}"),
    "early stopping": callback_flags("EarlyStopping", monitor="val", patience=1, stopping_threshold=100, mode="min")
    + ("--trainer.min_epochs=3",),
    "model checkpoint": callback_flags("ModelCheckpoint", dirpath="own", monitor="val", save_top_k=2, save_last="true"),
    "SWA and accumulation": SWA + callback_flags("GradientAccumulationScheduler", scheduling="{0: 2, 2: 4}"),
    "EMA and finetuning": callback_flags("resuming.Thaw") + callback_flags("EMAWeightAveraging", decay=0.8),
}


STOPS = (3, 12, 15)
"""Steps after which a run stops: in the first epoch, and in the middle and just before the end of the second epoch."""


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_identical_to_an_uninterrupted_run(tmp_path, case):
    uninterrupted = fit_in(tmp_path / "whole", *CASES[case])
    last = uninterrupted["summary"]["steps"] - 1
    resumed = fit_in(tmp_path / "resumed", *CASES[case], stops=[step for step in STOPS if step < last])
    for key in ("record", "weights", "saved weights", "callbacks"):
        assert differences(uninterrupted[key], resumed[key], key) == []
    assert (
        differences(
            dict(sorted(uninterrupted["weights"].items())), dict(sorted(uninterrupted["saved weights"].items()))
        )
        == []
    )
    for key in ("epochs", "steps", "samples", "metrics", "ledger"):
        assert uninterrupted["summary"][key] == resumed["summary"][key]
    assert [line.split(":")[0] for line in uninterrupted["summary"]["ledger"]] == [
        f"epoch {number}" for number in range(1, uninterrupted["summary"]["epochs"] + 1)
    ]
    for key in ("optimizer_states", "lr_schedulers", "state_dict"):
        assert differences(uninterrupted["state"][key], resumed["state"][key], key) == []


STOCK_FAILS = {
    "timer": "LightningCLI cannot write its defaults",
    "batch size finder in a later epoch": "trains on no batch in that epoch and those after it",
}


@pytest.mark.parametrize("case", [case for case in CASES if case not in STOCK_FAILS])
def test_callbacks_have_the_same_effect_as_in_stock_lightning(tmp_path, case):
    plain = ("--model.shuffle=false", "--model.dropout=0")  # stock loaders draw from the global generators
    run, stock = fit_in(tmp_path / "ours", *CASES[case], *plain), fit_stock(tmp_path / "stock", *CASES[case], *plain)
    for key in ("record", "weights"):
        assert differences(run[key], stock[key], key) == []


def test_weights_replaced_at_the_end_are_saved_but_not_trained_further(tmp_path):
    arguments = ("--trainer.callbacks+=resuming.ZeroAtTheEnd",)
    uninterrupted = fit_in(tmp_path / "whole", *arguments)
    stopped = fit_in(tmp_path / "half", *arguments, "--epochs", "2")
    assert all(not value.any() for value in stopped["saved weights"].values())
    resumed = fit_in(tmp_path / "half", *arguments)
    assert differences(uninterrupted["record"], resumed["record"]) == []
    assert all(not value.any() for value in resumed["saved weights"].values())
