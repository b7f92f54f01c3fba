"""Hooks where nothing is half done."""

from project.loop_hooks import LoopCallback
from project.loops import fit_loop_of
from running import train_here


class Watch(LoopCallback):
    def __init__(self):
        self.seen = []

    def note(self, what, trainer):
        loop = fit_loop_of(trainer)
        self.seen.append((what, loop.epochs_done, loop.epoch_loop.batches_done, loop.is_within_epoch))

    def on_train_start(self, trainer, pl_module):
        self.note("start", trainer)

    def on_ready(self, trainer):
        self.note("ready", trainer)

    def on_validation_end(self, trainer, pl_module):
        self.note("validated", trainer)

    def on_step_done(self, trainer):
        self.note("step", trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        self.note("epoch end", trainer)

    def on_epoch_done(self, trainer):
        self.note("epoch", trainer)


def watch(**settings):
    watching = Watch()
    train_here(watching, loops=True, limit_train_batches=4, num_sanity_val_steps=0, **settings)
    return watching.seen


def test_a_step_is_done_behind_its_validation_and_an_epoch_behind_its_hooks():
    assert watch(max_epochs=1, val_check_interval=2) == [
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


def test_a_step_of_several_batches_is_done_once():
    steps = [seen for seen in watch(max_epochs=1, accumulate_grad_batches=3) if seen[0] == "step"]
    assert [batches for _, _, batches, _ in steps] == [3, 4]


def test_an_epoch_that_is_broken_off_is_not_done():
    assert [what for what, *_ in watch(max_steps=6) if what == "epoch"] == ["epoch"]
