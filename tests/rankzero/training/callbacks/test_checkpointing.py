from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from rankzero import Trainer
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import Retention, checkpoints_in
from rankzero.runs.directory import RunDirectory
from rankzero.training.callbacks import checkpointing, held_checkpoint
from rankzero.training.callbacks.checkpointing import CLOCK_STEPS, CheckpointCallback, Interval
from rankzero.training.callbacks.held_checkpoint import HeldCheckpoint
from rankzero.training.fit_loop import fit_loop_of
from running import train_in_process
from stock import QUIET


def test_interval_is_read_from_text():
    expected = {"5": Interval(epochs=5), "200steps": Interval(steps=200), "1step": Interval(steps=1)}
    expected |= {"90s": Interval(seconds=90), "15min": Interval(seconds=900), "2h": Interval(seconds=7200)}
    assert {text: Interval.read(text) for text in expected} == expected


@pytest.mark.parametrize(
    ("interval", "settings", "steps"),
    [
        (Interval(epochs=1), {}, [7, 14, 21]),
        (Interval(epochs=2), {}, [14, 21]),
        (Interval(epochs=9), {}, [21]),
        (Interval(steps=5), {}, [5, 10, 15, 20, 21]),
        (Interval(seconds=0.001), {}, [16, 21]),
        (Interval(seconds=3600), {}, [21]),
        (Interval(steps=2), {"keep": 3, "max_epochs": 2}, [10, 12, 14]),
        (Interval(steps=1), {"max_epochs": 1, "accumulate_grad_batches": 3}, [1, 2, 3]),
    ],
    ids=str,
)
def test_saves_at_the_interval_and_at_the_end_and_keeps_the_newest(tmp_path, interval, settings, steps):
    settings = {"max_epochs": 3, "limit_train_batches": 7, "limit_val_batches": 0, "keep": 100, **settings}
    retention = Retention(settings.pop("keep"))
    callback = CheckpointCallback(RunDirectory(tmp_path), interval, lambda: {"run": "x"}, retention)
    plugins = [DirectoryCheckpointIO()]
    train_in_process(callback, loops=True, plugins=plugins, enable_checkpointing=True, **settings)
    saved = checkpoints_in(tmp_path / "checkpoints")
    assert [int(path.name.removeprefix("step-")) for path in saved] == steps


def test_rank_zeros_clock_decides_on_a_save_and_no_rank_waits_for_it_in_the_same_step(tmp_path, monkeypatch):
    callback = CheckpointCallback(RunDirectory(tmp_path), Interval(seconds=1), lambda: {"run": "x"}, Retention(1))
    trainer, events = SimpleNamespace(world_size=2), []

    def begin_gather_rows(row):
        events.append("begin")
        rows = torch.tensor([[1.0], [0.0]])  # only rank zero's clock has reached the interval
        return SimpleNamespace(wait=lambda: events.append("wait") or rows)

    monkeypatch.setattr(checkpointing, "strategy_of", lambda _: SimpleNamespace(begin_gather_rows=begin_gather_rows))
    callback.checked_step, clock = CLOCK_STEPS - 1, CLOCK_STEPS
    assert not callback._is_interval_over(clock, trainer) and events == ["begin"]
    assert callback._is_interval_over(clock + 1, trainer) and events == ["begin", "wait"]
    assert not callback._is_interval_over(clock + 2, trainer) and events == ["begin", "wait"]


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_only_rank_zero_copies_the_weights_of_the_last_checkpoint(tmp_path, is_rank_zero):
    callback = CheckpointCallback(RunDirectory(tmp_path), Interval(epochs=1), lambda: {"run": "x"}, Retention(1))
    callback._is_over = True
    checkpoint = {"state_dict": {"weight": torch.ones(2)}}
    callback.on_save_checkpoint(SimpleNamespace(is_global_zero=is_rank_zero), None, checkpoint)
    assert list(callback._last_weights) == ["weight"] * is_rank_zero


class Net(DropoutNet):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()


class RecordingLogger(CSVLogger):
    """Records the newest and the best checkpoint after each save, as loggers do that upload checkpoints."""

    def after_save_checkpoint(self, checkpoint_callback):
        paths = checkpoint_callback.last_model_path, checkpoint_callback.best_model_path
        self.saved = [*getattr(self, "saved", []), paths]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_public_attributes_of_the_best_checkpoint_are_those_of_lightnings_model_checkpoint(script_folder, mode):
    """Only the paths differ."""
    stock, logger = ModelCheckpoint(monitor="val_loss", mode=mode, save_last=True), RecordingLogger("logs")
    trainer = Trainer(max_epochs=3, keep_best=f"{mode}:val_loss", logger=logger, **QUIET)
    own = trainer.checkpoint_callback
    assert own.best_model_path == ""
    for user in (pl.Trainer(max_epochs=3, callbacks=stock, **QUIET), trainer):
        user.fit(Net(width=3), samples(), samples())
    names = {name for name in {*dir(ModelCheckpoint), *vars(stock)} if not name.startswith("_")}
    found, expected = ({name: getattr(callback, name) for name in names} for callback in (own, stock))
    (score,), (expected_score,) = (values.pop("best_k_models").values() for values in (found, expected))
    assert score == expected_score
    differing = {name for name in names if not callable(found.get(name)) and found.get(name) != expected.get(name)}
    assert {name for name in differing if not name.endswith("_path")} == {"dirpath", "state_key"}
    for path in (own.best_model_path, own.last_model_path):
        assert path.startswith(f"{own.dirpath}/") and Net.load_from_checkpoint(path).hparams == {"width": 3}
        assert torch.load(path)["optimizer_states"]
    assert len(logger.saved) == 3 and logger.saved[-1] == (own.last_model_path, own.best_model_path)
    assert Path(own.last_model_path).parent.name == "step-00000018"


SLOW = 3.0


class Paused(BoringModel):
    """Takes time in steps, by their number from 0, and in validation."""

    def __init__(self, clock, slow_steps, validation):
        super().__init__()
        self.clock, self.slow_steps, self.validation = clock, slow_steps, validation

    def training_step(self, batch, batch_idx):
        self.clock.now += SLOW if self.trainer.global_step in self.slow_steps else 0.001
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 0.0 if self.trainer.sanity_checking else self.validation
        return super().validation_step(batch, batch_idx)


class Recorder(Callback):
    """Stands for the checkpoint callback: records the steps after which it holds a checkpoint."""

    def __init__(self, clock, pause):
        self.clock, self.pause, self.steps, self.channel = clock, pause, [], SimpleNamespace()

    def setup(self, trainer, pl_module, stage):
        fit_loop_of(trainer).extra_subscribers.append(HeldCheckpoint(self.channel, self))

    def hold(self, trainer):
        self.steps.append(trainer.global_step)
        self.clock.now += self.pause

    def write_held(self):
        pass


SLOW_VALIDATION = {"validation": SLOW, "limit_val_batches": 1}
COPY = 0.02 * SLOW
"""Seconds of a copy that takes two percent of a slow step."""
SLOW_COPY = {"slow_steps": range(16), "pause": 5.5 * COPY}
CASES = {
    "nothing is held without slow steps": ({}, []),
    "nothing is held after one slow step": ({"slow_steps": [0]}, []),
    "before each slow step": ({"slow_steps": range(8)}, [2, 3, 4, 5, 6, 7]),
    "once more after the steps have become fast": ({"slow_steps": range(4)}, [2, 3, 4]),
    "two percent of the time of slow steps": ({**SLOW_COPY, "limit_train_batches": 16}, [2, 8, 14]),
    "two percent of the time of slow epochs": ({**SLOW_COPY, "limit_train_batches": 1, "max_epochs": 16}, [1, 7, 13]),
    "two percent of the time of slow validations": (
        {**SLOW_VALIDATION, "val_check_interval": 2, "pause": 2.5 * COPY, "limit_train_batches": 16},
        [3, 9, 15],
    ),
    "before a slow validation": ({**SLOW_VALIDATION, "val_check_interval": 2}, [3, 5, 7]),
    "before the validation of each epoch": ({**SLOW_VALIDATION, "max_epochs": 4, "limit_train_batches": 3}, [5, 8, 11]),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_are_held_before_slow_steps_and_validations(monkeypatch, case):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # the time passes only in the model and the recorder
    monkeypatch.setattr(held_checkpoint, "time", clock)
    settings = {"max_epochs": 1, "limit_train_batches": 8, "limit_val_batches": 0, **CASES[case][0]}
    slow_steps, validation = settings.pop("slow_steps", ()), settings.pop("validation", 0.0)
    recorder = Recorder(clock, settings.pop("pause", 0.0))
    train_in_process(recorder, model=Paused(clock, slow_steps, validation), loops=True, **settings)
    assert recorder.channel.on_stop == recorder.write_held
    assert recorder.steps == CASES[case][1]


def test_the_time_of_a_copy_on_a_gpu_is_measured_without_the_steps_before_it(monkeypatch):
    clock, waits = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), cycle([SLOW, SLOW_COPY["pause"]])
    monkeypatch.setattr(held_checkpoint, "time", clock)
    monkeypatch.setattr(held_checkpoint, "synchronize", lambda _: setattr(clock, "now", clock.now + next(waits)))
    recorder, model = Recorder(clock, 0.0), Paused(clock, range(16), 0.0)
    train_in_process(recorder, model=model, loops=True, max_epochs=1, limit_train_batches=16, limit_val_batches=0)
    assert recorder.steps == CASES["two percent of the time of slow steps"][1]
