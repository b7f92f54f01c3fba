"""The fast path through an epoch: changes in the middle of an epoch and metrics are as in stock Lightning."""

import functools
import sys

import pytest
from lightning.pytorch.trainer import call
from stock import BATCHES, CHANGED_IN, Net, assert_same_after_change, same, train

from rankzero.training.epoch_loop import EpochLoop


def change_accumulation(callback, trainer, module):
    trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize("hook", CHANGED_IN)
def test_a_changed_accumulation_takes_effect_at_once(hook):
    assert_same_after_change(change_accumulation, hook)


def test_a_step_makes_no_call_of_lightning_that_does_nothing():
    called, generic = [], {getattr(call, name).__code__ for name in dir(call) if name.startswith("_call_")}

    def spy(frame, event, argument):
        if event == "call" and frame.f_code in generic:
            called.append(frame.f_locals.get("hook_name", ""))

    sys.setprofile(spy)
    try:
        train(True, Net(), max_epochs=1, limit_val_batches=0)
    finally:
        sys.setprofile(None)
    assert "on_train_epoch_start" in called
    assert not {hook for hook in called if "batch" in hook or "step" in hook or "backward" in hook or "zero" in hook}


class ReadsMetrics(Net):
    """Reads what was logged, in the same step, and by dictionaries that it holds."""

    def on_train_start(self):
        self.held = self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.seen += [{name: float(value) for name, value in held.items()} for held in self.held]


@pytest.mark.parametrize("reads", [True, False])
def test_metrics_are_as_fresh_as_in_lightning(reads):
    def observe(ours):
        module = ReadsMetrics()
        if not reads:
            module.training_step = functools.partial(Net.training_step, module)
        result, _ = train(ours, module, log_every_n_steps=5)
        return result, module.seen

    (ours, seen), (stock, stock_seen) = observe(True), observe(False)
    assert same(ours, stock)
    assert seen == stock_seen and len(seen) == BATCHES * 2 * (4 if reads else 3)


def test_unobserved_metrics_are_updated_only_at_logging_steps(monkeypatch):
    shown = []
    show = EpochLoop.show_metrics
    monkeypatch.setattr(EpochLoop, "show_metrics", lambda self, *reduces: shown.append(1) or show(self, *reduces))
    train(True, Net(), max_epochs=1, log_every_n_steps=4, limit_val_batches=0)
    assert len(shown) == BATCHES // 4
