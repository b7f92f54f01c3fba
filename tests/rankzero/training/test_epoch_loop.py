from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from rankzero import Trainer as RunTrainer
from rankzero.runs.directory import RunDirectory
from rankzero.show.report.curves import read_curves
from rankzero.training import lightning_inside
from running import script_process
from stock import Loaders, ManualNet, Net, assert_equals_stock, assert_same_training, observe, train, with_methods


def step_lr(every=3):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def step_schedule_twice(self, scheduler, metric):
    scheduler.step()
    scheduler.step()


def double_batch(self, batch, dataloader_idx):
    return [tensor * 2 for tensor in batch]


def early_stopping(*arguments, interval=1.0, **settings):
    callbacks = {"make_callbacks": lambda: [EarlyStopping(*arguments, **settings)]}
    return {**callbacks, "val_check_interval": interval, "max_epochs": 9}


def log_in_hook(self, batch, batch_idx):
    self.log("begun", float(batch_idx))
    self.log("loss", 3.0)


STOPS = LambdaCallback(on_train_batch_end=lambda trainer, *values: setattr(trainer, "should_stop", values[-1] == 3))


# tests/rankzero/contract/test_arguments.py compares each argument of the Trainer.
SCHEDULED = partial(Net, schedule=step_lr(), interval="step")
OWN_SCHEDULE = with_methods("OwnSchedule", lr_scheduler_step=step_schedule_twice)
CASES = {
    "nothing special": (Net, {}),
    "a schedule of steps": (SCHEDULED, {}),
    "a schedule of every second step": (partial(SCHEDULED, frequency=2), {}),
    "a schedule of steps, accumulating": (partial(SCHEDULED, schedule=step_lr(2)), {"accumulate_grad_batches": 2}),
    "a schedule of epochs": (partial(Net, schedule=step_lr(1), interval="epoch"), {"max_epochs": 3}),
    "a plateau of epochs": (partial(Net, schedule=plateau, monitor="val"), {"max_epochs": 4}),
    "a plateau of steps": (partial(Net, schedule=plateau, monitor="loss", interval="step"), {}),
    "a plateau of another metric": (partial(Net, schedule=plateau, monitor="both_epoch"), {"max_epochs": 4}),
    "max_steps in the second epoch": (Net, {"max_steps": 11, "max_epochs": -1}),
    "max_steps, accumulating": (Net, {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2}),
    "validation by batches over epochs": (Net, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "a rest of a batch": (Net, {"loaders": Loaders(29)}),
    "a log of few steps": (Net, {"log_every_n_steps": 5, "max_epochs": 3}),
    "lr_scheduler_step": (partial(OWN_SCHEDULE, schedule=step_lr(5), interval="step"), {}),
    "on_after_batch_transfer": (with_methods("Moves", on_after_batch_transfer=double_batch), {}),
    "on_before_batch_transfer": (with_methods("Moves", on_before_batch_transfer=double_batch), {}),
    "a hook that logs": (with_methods("Logs", on_train_batch_start=log_in_hook), {}),
    "should_stop": (Net, {"make_callbacks": lambda: [STOPS], "max_epochs": 4}),
    "should_stop, but not yet": (Net, {"make_callbacks": lambda: [STOPS], "max_epochs": 4, "min_epochs": 2}),
    "early stopping": (Net, early_stopping("val", patience=0, min_delta=0.05)),
    "early stopping in an epoch": (Net, early_stopping("loss", 0.5, 1, interval=2, check_on_train_epoch_end=False)),
    "a loader without a length": (Net, {"loaders": Loaders(has_length=False)}),
    "a GradientAccumulationScheduler": (Net, {"make_callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 4})]}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_identical_to_stock_lightning(case):
    make_module, settings = CASES[case]
    assert_same_training(make_module, **settings)


def test_on_train_batch_start_can_skip_the_rest_of_an_epoch():
    make_module = with_methods("Skips", on_train_batch_start=lambda self, batch, index: -1 if index == 3 else None)
    assert_equals_stock(lambda uses_rankzero: {**observe(uses_rankzero, make_module), "counts": None})


@pytest.mark.parametrize("settings", [{}, {"profiler": "simple"}])
@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_raises_stop_iteration_is_an_error_and_no_end_of_the_epoch(settings, last):
    def step(self, batch, index):
        return next(iter(())) if index == (self.trainer.num_training_batches - 1 if last else 3) else self.loss(batch)

    with pytest.raises(RuntimeError, match="StopIteration in a training step would end the epoch"):
        train(True, with_methods("Raises", training_step=step)(), **settings)


TAKES_ITERATOR = with_methods("Takes", training_step=lambda self, dataloader_iter: self.loss(next(dataloader_iter)[0]))


@pytest.mark.parametrize(
    ("make_module", "settings", "reason"),
    [
        (ManualNet, {}, "ManualNet uses manual optimization"),
        (TAKES_ITERATOR, {}, "training_step takes dataloader_iter"),
        (Net, {"profiler": "simple"}, "SimpleProfiler measures the parts of Lightning's loop"),
        (Net, {}, "slower training loop: Rankzero's loop is not tested with lightning"),
    ],
)
def test_unsupported_training_uses_lightnings_loop_and_prints_the_reason(
    make_module, settings, reason, capsys, monkeypatch
):
    if "not tested" in reason:
        monkeypatch.setattr(lightning_inside, "TESTED_VERSIONS", ())
    assert_same_training(make_module, **settings)
    assert capsys.readouterr().out.count(reason) == 2


def saved_states(uses_rankzero, folder):
    """Returns the parts of Lightning's checkpoints that both loops determine, by the checkpoint's file name."""
    checkpoints = ModelCheckpoint(folder / str(uses_rankzero), every_n_train_steps=3, save_top_k=-1)
    train(uses_rankzero, SCHEDULED(), [checkpoints])
    keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    saved = {path.name: torch.load(path, weights_only=False) for path in sorted(Path(checkpoints.dirpath).iterdir())}
    return {name: {key: dict(state)[key] for key in keys} for name, state in saved.items()}


def test_model_checkpoint_saves_the_same_state_as_in_stock_lightning(tmp_path):
    assert len(assert_equals_stock(saved_states, tmp_path)) == 5


def saves_at(points, folder):
    """Returns a callback that saves at points of the second epoch: hooks and batches, which name the checkpoint."""

    def save(hook, trainer, *arguments):
        point = hook, trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.current_epoch == 1 and point in points:
            trainer.save_checkpoint(folder / f"{hook}-{point[1]}.ckpt")

    return LambdaCallback(**{hook: partial(save, hook) for hook, _ in points})


class SeededModel(BoringModel):
    def train_dataloader(self):
        return DataLoader(torch.rand(17, 32, generator=torch.Generator().manual_seed(1)), batch_size=2)


def trained_in(folder, *callbacks, ckpt_path=None, model_class=SeededModel, **settings):
    """Trains for three epochs of 17 samples, and returns the weights, the train loss by step, and the ledger."""
    torch.manual_seed(1)
    with script_process(folder.parent):
        trainer = RunTrainer(
            max_epochs=3, accelerator="cpu", root=folder.parent, name=folder.name, resume="never", quiet=True,
            callbacks=list(callbacks), log_every_n_steps=2, limit_val_batches=0, **settings,
        )  # fmt: skip
        model = model_class()
        trainer.fit(model, ckpt_path=ckpt_path)
    assert trainer.fit_loop.epoch_loop.steps_done == trainer.global_step
    curve = read_curves(folder)["train/loss"]
    ledger = RunDirectory(folder).read("summary.json")["ledger"]
    return model.layer.weight.detach().clone(), dict(zip(curve.steps, curve.values, strict=True)), ledger


HOOKS = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
FIRST, LAST = (*HOOKS, "on_before_zero_grad"), (*HOOKS, "on_before_optimizer_step")
"""Hooks in the first batch of a step, and in the last."""


@pytest.mark.parametrize(
    ("micro_batches", "limit", "points"),
    [
        (1, 9, [(hook, 4) for hook in FIRST]),
        (2, 9, [*((hook, 3) for hook in FIRST), *((hook, 4) for hook in LAST)]),
        (3, 9, [(hook, 9) for hook in LAST]),
        (3, 5, [*((hook, 4) for hook in FIRST), *((hook, 5) for hook in LAST)]),
    ],
    ids=str,
)
def test_a_run_resumes_exactly_from_a_checkpoint_saved_in_any_hook(tmp_path, micro_batches, limit, points):
    """A checkpoint in the middle of a step has no gradients, so the resumed run takes the whole step again."""
    settings = {"accumulate_grad_batches": micro_batches, "limit_train_batches": limit}
    weights, losses, ledger = trained_in(tmp_path / "whole", saves_at(points, tmp_path), **settings)
    for hook, batch in points:
        name = f"{hook}-{batch}"
        resumed = trained_in(tmp_path / name, ckpt_path=tmp_path / f"{name}.ckpt", **settings)
        assert torch.equal(resumed[0], weights) and resumed[2] == ledger, name
        assert resumed[1].items() <= losses.items() and max(resumed[1]) == max(losses), name


def test_steps_are_counted_once_if_a_resumed_run_accumulates_differently(tmp_path):
    points = [("on_train_batch_end", 3), ("on_train_batch_end", 4)]
    trained_in(tmp_path / "whole", saves_at(points, tmp_path), accumulate_grad_batches=2)
    for batch, micro_batches in ((4, 1), (3, 4)):
        checkpoint = tmp_path / f"on_train_batch_end-{batch}.ckpt"
        trained_in(tmp_path / str(batch), ckpt_path=checkpoint, accumulate_grad_batches=micro_batches)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3}, {"profiler": "simple"}])
def test_a_run_resumes_exactly_from_a_checkpoint_saved_before_a_batch(tmp_path, settings):
    checkpoint = tmp_path / "saved.ckpt"

    class SavesInTransfer(SeededModel):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            if not checkpoint.exists() and self.trainer.fit_loop.epoch_loop.batch_progress.total.ready == 13:
                self.trainer.save_checkpoint(checkpoint)
            return batch

    weights, losses, ledger = trained_in(tmp_path / "whole", model_class=SavesInTransfer, **settings)
    resumed = trained_in(tmp_path / "resumed", ckpt_path=checkpoint, model_class=SavesInTransfer, **settings)
    assert torch.equal(resumed[0], weights) and resumed[2] == ledger and resumed[1].items() <= losses.items()


def test_losses_of_a_step_that_is_not_taken_are_discarded(tmp_path):
    """The epoch ends after two steps and one of the two batches of the third step."""

    class SkipsRest(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            return -1 if trainer.current_epoch == 0 and batch_idx == 5 else None

    def save(hook, epoch, trainer, *arguments):
        path = tmp_path / f"{hook}.ckpt"
        if trainer.current_epoch == epoch and not path.exists():
            trainer.save_checkpoint(path)

    epochs = {"on_train_epoch_end": 0, "on_train_epoch_start": 1, "on_train_batch_end": 1}
    saves = LambdaCallback(**{hook: partial(save, hook, epoch) for hook, epoch in epochs.items()})
    train = partial(trained_in, accumulate_grad_batches=2)
    weights, losses, _ = train(tmp_path / "whole", SkipsRest(), saves)
    for hook in epochs:
        resumed = train(tmp_path / hook, SkipsRest(), ckpt_path=tmp_path / f"{hook}.ckpt")
        assert torch.equal(resumed[0], weights), hook
        assert resumed[1] == pytest.approx({step: losses[step] for step in resumed[1]}, rel=1e-6), hook
