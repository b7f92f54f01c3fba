from functools import partialmethod

import pytest
from boring_models import WeightedNet
from lightning.pytorch import Trainer

from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from running import fit_in_process, restore_process_state, train_in_process
from stock import SILENT


class HookRecorder(LoopCallback):
    def __init__(self):
        self.seen = []

    def record(self, name, trainer, *arguments):
        loop = fit_loop_of(trainer)
        self.seen.append((name, loop.epochs_done, loop.epoch_loop.batches_done, loop.is_within_epoch))

    on_train_start, on_ready = partialmethod(record, "start"), partialmethod(record, "ready")
    on_validation_end, on_step_done = partialmethod(record, "validated"), partialmethod(record, "step")
    on_train_epoch_end, on_epoch_done = partialmethod(record, "epoch end"), partialmethod(record, "epoch")


def recorded_hooks(**settings):
    recorder = HookRecorder()
    train_in_process(recorder, loops=True, limit_train_batches=4, num_sanity_val_steps=0, **settings)
    return recorder.seen


def test_step_is_done_after_its_validation_and_epoch_after_its_hooks():
    assert recorded_hooks(max_epochs=1, val_check_interval=2) == [
        ("start", 0, 0, False),
        ("ready", 0, 0, False),
        ("step", 0, 1, True),
        ("validated", 0, 2, True),
        ("step", 0, 2, True),
        ("step", 0, 3, True),
        ("validated", 0, 4, True),
        ("step", 0, 4, True),
        ("epoch end", 1, 4, False),
        ("epoch", 1, 4, False),
    ]


def test_on_step_done_is_called_once_per_accumulated_step_and_on_epoch_done_only_for_complete_epochs():
    seen = recorded_hooks(max_steps=3, accumulate_grad_batches=3)
    assert [batches for hook, _, batches, _ in seen if hook == "step"] == [3, 4, 3]
    assert [hook for hook, *_ in seen if hook == "epoch"] == ["epoch"]


def positions_by_stock(*max_steps):
    WeightedNet.positions.clear()
    with restore_process_state():
        for number, steps in enumerate(max_steps):
            trainer = Trainer(max_steps=steps, max_epochs=-1, **SILENT)
            trainer.fit(WeightedNet(), ckpt_path="stock.ckpt" if number else None)
            trainer.save_checkpoint("stock.ckpt")
    return list(WeightedNet.positions)


@pytest.mark.parametrize("max_steps", [(3, 6), (11, 13)])
def test_user_sampler_resumes_after_max_steps_at_the_same_batch_as_in_lightning(max_steps, cwd):
    stock = positions_by_stock(*max_steps)
    resumed = slice(max_steps[0], None)
    stock[resumed] = [(epoch - 1, *position) for epoch, *position in stock[resumed]]  # Lightning counts the epoch twice
    WeightedNet.positions.clear()
    for steps in max_steps:
        fit_in_process("--model", "boring_models.WeightedNet", "--run", "x", "--trainer.max_steps", str(steps))
    assert stock == WeightedNet.positions and stock[max_steps[0]][1] == max_steps[0] % 8
