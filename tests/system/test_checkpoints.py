"""Checkpoints of whole runs: which are kept, also on a full disk, and which settings a resumed run changes."""

import pytest

from rankzero.checkpoints.manifest import checkpoints_in, newest_valid
from running import disk_at
from stock import differences
from system.forks import fit_on_ranks, outputs, summary
from system.test_exactly_once import CLASSES, learned_state


@pytest.fixture
def small_disk(user_folder):
    with disk_at(user_folder / "runs", "768k") as disk:
        yield disk


FILL_CALLBACK = """
from lightning.pytorch import Callback

class Fill(Callback):
    def __init__(self, empties: int):
        self.empties = empties

    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == 0 and trainer.current_epoch == 2:
            with open("runs/filling", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1024))
                except OSError:
                    pass
        if trainer.global_rank == 0 and trainer.current_epoch == self.empties:
            import os
            os.remove("runs/filling")
"""


@pytest.mark.parametrize(
    ("empties", "how", "code"),
    [(4, "warn", 0), pytest.param(9, "warn", 1, marks=pytest.mark.soak), (9, "stop", 1)],
    ids=["room again", "full", "stops"],
)
def test_a_full_disk_keeps_the_newest_checkpoint_to_resume_from(user_folder, small_disk, empties, how, code):
    (user_folder / "fill.py").write_text(FILL_CALLBACK)
    filling = ("--trainer.callbacks", "fill.Fill", "--trainer.callbacks.empties", f"{empties}", "--save_errors", how)
    arguments = (*CLASSES, "--data.count", "64", "--epochs", "6", "--run", "x")
    fit_on_ranks(*arguments, *filling, folder=user_folder, world=2, code=code)
    printed = outputs(user_folder)[0]
    assert "could not be saved: [Errno 28] No space left on device" in printed and "Traceback" not in printed
    assert "the newest checkpoint is runs/x/checkpoints/step-0000000" in printed
    newest, refused = newest_valid(small_disk / "x/checkpoints")
    assert newest and not refused
    assert {path.name for path in newest.parent.iterdir()} == {path.name for path in checkpoints_in(newest.parent)}
    if code == 0:
        assert newest.name == "step-00000012" and summary(user_folder, "x")["status"] == "finished"
        return
    (small_disk / "filling").unlink()
    fit_on_ranks(*arguments, folder=user_folder, world=2)
    fit_on_ranks(*arguments, "--run", "whole", folder=user_folder, world=2)
    assert not differences(learned_state(small_disk / "whole"), learned_state(small_disk / "x"))
