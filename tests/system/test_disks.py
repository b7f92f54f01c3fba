"""Saves that a crash, a disk error or a user interrupts: the last complete checkpoint remains."""

from pathlib import Path

import pytest
import torch
from checkpoint_files import names

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import checkpoints_in, clean, newest_valid, verify
from rankzero.checkpoints.write import export_weights
from rankzero.messages import RequestError
from rankzero.show.report.curves import read_curves
from running import disk_at, fit, require
from system.saving import CALLS, NEWEST, STEPS, Saver, start_saver

pytestmark = pytest.mark.xdist_group("disks")


@pytest.fixture(scope="module")
def saver():
    require("strace")
    with start_saver() as process:
        yield process


def newest_content(folder: Path) -> tuple[int, int] | None:
    """Verifies all checkpoints, and returns step and content of the newest."""
    for checkpoint in checkpoints_in(folder):
        verify(checkpoint)
    newest, _ = newest_valid(folder)
    if newest is None:
        return None
    loaded = DirectoryCheckpointIO().load_checkpoint(newest)
    assert torch.equal(loaded["a"], loaded["b"]) and len(loaded["a"].unique()) == 1
    return loaded["global_step"], int(loaded["a"][0])


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*")) + sorted(path.name for path in folder.glob("*.replaced"))


def fault_numbers(saver: Saver, folder: Path, call: str, selection: str) -> range:
    """Returns the numbers of the calls that get the fault: all, or about two."""
    calls = [name for name, _ in saver.save(folder / "counted").calls]
    assert set(calls) == set(CALLS), "a save no longer makes one of them"
    count = calls.count(call)
    return range(1, count + 1, 1 if selection == "all" else max(1, count // 2))


CAMPAIGN = pytest.mark.parametrize("selection", ["some", pytest.param("all", marks=pytest.mark.soak)])


def test_without_a_fault_every_save_succeeds(saver, tmp_path):
    folder = tmp_path / "checkpoints"
    outcome = saver.save(folder)
    assert (outcome.code, outcome.done) == (0, [True] * len(STEPS))
    assert newest_content(folder) == NEWEST[-1] and leftovers(folder) == []
    assert [path.name for path in checkpoints_in(folder)] == ["step-00000002", "step-00000003"]


def test_files_and_folders_are_synced_before_later_calls_rely_on_them(saver, tmp_path):
    """A power cut would lose files that are not synced, a kill does not. So the test checks the order of the calls."""
    calls = saver.save(tmp_path / "run" / "checkpoints").calls
    found = [f"{call} {file}".strip() for call, file in calls if call in ("fsync", "rename", "unlinkat")]

    def written(step: int) -> list[str]:
        return ["fsync state.pt", "fsync manifest.json", f"fsync .step-{step:08d}.saving"]

    renamed = ["rename", "fsync checkpoints"]
    removed = [*renamed, "unlinkat", "unlinkat"]
    created = [f"fsync {tmp_path.name}", "fsync run"]
    replaced = [*written(2), "rename", *renamed, *removed]
    expected = [*created, *written(1), *renamed, *written(2), *renamed, *replaced, *removed, *written(3), *renamed]
    assert [call.partition(" ")[0] if "deleting" in call else call for call in found] == expected


@CAMPAIGN
@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_keeps_the_last_complete_checkpoint(saver, tmp_path, call, selection):
    for number in fault_numbers(saver, tmp_path, call, selection):
        folder = tmp_path / str(number)
        outcome = saver.save(folder, f"{call}:signal=KILL:when={number}")
        assert outcome.code == -9 and all(outcome.done)
        finished = len(outcome.done)
        found = newest_content(folder)
        assert found in NEWEST[finished : finished + 2], (number, outcome)
        clean(folder)
        assert newest_content(folder) == found and not [name for name in leftovers(folder) if name[0] == "."]
        repeated = saver.save(folder)
        assert all(repeated.done) and newest_content(folder) == NEWEST[-1] and leftovers(folder) == []


@CAMPAIGN
@pytest.mark.parametrize(
    "error", ["EIO", "ENOSPC", *(pytest.param(name, marks=pytest.mark.soak) for name in ("EROFS", "EDQUOT"))]
)
@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_any_system_call_keeps_the_last_complete_checkpoint(saver, tmp_path, call, error, selection):
    for number in fault_numbers(saver, tmp_path, call, selection):
        folder = tmp_path / str(number)
        outcome = saver.save(folder, f"{call}:error={error}:when={number}")
        assert outcome.code == 0 and len(outcome.done) == len(STEPS), outcome
        assert outcome.done.count(False) <= 1
        saved = [NEWEST[i + 1] for i, done in enumerate(outcome.done) if done and STEPS[i] is not None]
        # If the error follows the rename, the new checkpoint exists, but a power cut could remove it.
        assert newest_content(folder) in (saved[-1], NEWEST[-1]), (number, outcome)
        clean(folder)
        assert leftovers(folder) == [], number


@pytest.fixture
def disk(tmp_path):
    with disk_at(tmp_path / "disk", "4m") as disk:
        yield disk


def content(step, megabytes=1.5):
    return {"global_step": step, "a": torch.full((int(megabytes * 1e6 / 8),), step), "b": torch.full((1,), step)}


def test_a_save_to_a_full_disk_reports_the_error_and_keeps_older_checkpoints(disk):
    """test_checkpoints.py fills the disk during a save in the background."""
    plugin = DirectoryCheckpointIO()
    plugin.folder = disk / "elsewhere"
    for step in (1, 2):
        plugin.save_checkpoint(content(step), disk / f"step-{step}")
    with pytest.raises(OSError, match="No space left"):
        plugin.save_checkpoint(content(3), disk / "step-3")
    assert names(disk) == ["step-1", "step-2"] and newest_valid(disk) == (disk / "step-2", [])
    plugin.remove_checkpoint(disk / "step-1")
    plugin.save_checkpoint(content(3), disk / "step-3")
    assert newest_valid(disk) == (disk / "step-3", [])


def test_a_full_disk_keeps_single_files_and_leaves_no_partial_file(disk):
    plugin = DirectoryCheckpointIO()
    plugin.save_checkpoint(content(1, 3), disk / "best.ckpt")
    with pytest.raises(OSError, match="No space left"):
        plugin.save_checkpoint(content(2, 3), disk / "best.ckpt")
    assert names(disk) == ["best.ckpt"] and plugin.load_checkpoint(disk / "best.ckpt")["global_step"] == 1
    torch.save({"state_dict": content(1, 3)}, disk.parent / "x.ckpt")
    for suffix in (".pt", ".safetensors"):
        with pytest.raises(RequestError, match="No space left"):
            export_weights(disk.parent / "x.ckpt", disk / f"x{suffix}")
    assert names(disk) == ["best.ckpt"]


DELETING = """
import shutil
from lightning.pytorch import Callback

class Delete(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 20 and trainer.is_global_zero:
            shutil.rmtree("runs/x")
"""


def test_a_run_whose_folder_is_deleted_continues_with_one_warning_for_each_kind_of_log(tmp_path):
    (tmp_path / "deleting.py").write_text(DELETING)
    toy = ("--model", "MLP", "--data", "Toy", "--name", "x", "--epochs", "3", "--devices", "2")
    result = fit(*toy, "--trainer.callbacks+=deleting.Delete", "--trainer.log_every_n_steps", "1", folder=tmp_path)
    warnings = [line for line in result.err.splitlines() if "was deleted during the run" in line]
    assert [sum(f"runs/x/{folder}" in line for line in warnings) for folder in ("tensorboard", "logs")] == [1, 1]
    summary, run = result.summary("x"), tmp_path / "runs/x"
    assert len(warnings) == 2 and (summary["status"], summary["epochs"]) == ("finished", 3)
    assert read_curves(run)["train/loss"].steps[-1] == summary["steps"] - 1
    assert all((run / f"logs/rank-{rank:03d}.log").read_text() for rank in (0, 1))
    assert newest_valid(run / "checkpoints") == (run / f"checkpoints/step-{summary['steps']:08d}", [])
