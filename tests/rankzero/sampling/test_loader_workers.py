"""Loader processes live exactly as long as in stock Lightning."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from lightning.pytorch import Callback
from stock import SIZE, Loaders, Net, train

from running import REPOSITORY, SOURCES


class Children(Callback):
    """Notes how many loader processes there are."""

    def __init__(self, fails_in=None):
        self.seen, self.fails_in = [], fails_in

    def note(self, place):
        self.seen.append((place, len(living_children())))

    def on_train_epoch_start(self, trainer, module):
        self.note("epoch start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.note("second batch")
        if (trainer.current_epoch, batch_idx) == self.fails_in:
            raise ZeroDivisionError

    def on_validation_epoch_start(self, trainer, module):
        self.note("validation start")

    def on_validation_epoch_end(self, trainer, module):
        self.note("validation end")

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch end")


def living_children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def children_of(ours, persistent, fails_in=None):
    children = Children(fails_in)
    settings = {"num_workers": 2, "persistent_workers": persistent}
    before = len(living_children())
    try:
        train(
            ours,
            Net(),
            [children],
            Loaders(**settings),
            Loaders(2 * SIZE, num_workers=1, persistent_workers=persistent),
            max_epochs=4,
            val_check_interval=0.5,
        )
    except ZeroDivisionError:
        assert fails_in
    deadline = time.monotonic() + 5
    while len(living_children()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return [(place, count - before) for place, count in children.seen], len(living_children()) - before


@pytest.mark.parametrize("fails_in", [None, (1, 2)])
@pytest.mark.parametrize("persistent", [False, True])
def test_there_are_as_many_loader_processes_as_in_lightning(persistent, fails_in):
    (ours, left), (stock, _) = (children_of(way, persistent, fails_in) for way in (True, False))
    assert ours == stock and left == 0


ENDS = """
from lightning.pytorch import Callback
from stock import Loaders, Net, train

class Ends(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            trainer.should_stop = True
            if module.raises:
                raise ZeroDivisionError

kept = []
for persistent in (False, True):
    for raises in (False, True):
        module = Net()
        module.raises = raises
        try:
            train(True, module, [Ends()], Loaders(num_workers=2, persistent_workers=persistent))
        except ZeroDivisionError as error:
            kept.append(error)  # with its traceback, and all that its frames refer to
"""


@pytest.mark.system
def test_a_process_ends_although_loader_processes_ignore_signals():
    folder = REPOSITORY / "tests"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{SOURCES}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ENDS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "can only test a child process" not in done.stderr
