"""A checkpoint is written completely or not at all, even if the save is interrupted."""

import errno
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import names, save, serialized

from rankzero.checkpoints import write
from rankzero.checkpoints.atomic_files import write_text
from rankzero.checkpoints.checkpoint_io import Snapshots
from rankzero.checkpoints.manifest import MANIFEST, STATE, newest_valid, read_manifest, verify
from rankzero.checkpoints.safe_load import load
from rankzero.checkpoints.write import _move_to_target, remove_directory, write_directory, write_state
from running import REPOSITORY


@pytest.mark.parametrize("leftovers", [(), (".replaced",), ("", ".replaced")])
def test_saving_a_step_again_replaces_its_checkpoint_and_that_of_an_interrupted_replacement(saved, leftovers):
    target = saved / "step-00000020"
    if leftovers:
        target.rename(saved / "step-00000020.replaced")
    if "" in leftovers:
        save(saved, 20)
    save(saved, 20, w=7)
    assert names(saved) == ["step-00000010", "step-00000020"] and load(target)["w"] == 7
    shutil.copytree(target, saved / "step-00000020.replaced")
    (target / STATE).write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        _move_to_target(saved / "never-written", target)
    assert newest_valid(saved) == (target, [])  # the damaged checkpoint was removed


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"f": lambda: None}, "pickle"),
        *(({"rankzero": {"x": value}}, "JSON") for value in (float("nan"), float("inf"), {1, 2})),
    ],
)
def test_content_that_torch_or_json_cannot_represent_is_refused_and_leaves_no_files(saved, entries, error):
    with pytest.raises(Exception, match=error):
        save(saved, 30, **entries)
    assert names(saved) == ["step-00000010", "step-00000020"]


def test_a_state_whose_classes_torch_cannot_list_is_saved_and_read_by_the_same_user(saved):
    save(saved, 30, number=1 << 3000)
    assert load(saved / "step-00000030")["number"] == 1 << 3000


@pytest.mark.parametrize("rows", [0, 1, 70_000])
def test_a_state_has_the_bytes_that_torch_save_writes_and_its_manifest_describes_them(tmp_path, rows):
    state = {"w": torch.arange(3.0 * rows).view(3, rows), "step": 3, "part": torch.ones(4)[1:3]}
    path = tmp_path / "new" / "step-1"
    write_directory(state, path)
    found = (path / STATE).read_bytes()
    assert found == serialized(state)
    description = {"bytes": len(found), "sha256": hashlib.sha256(found).hexdigest()}
    assert read_manifest(path)["files"] == {STATE: description}
    hashed = write_state(state, tmp_path / STATE)
    assert {"bytes": hashed.bytes, "sha256": hashed.sha256} == description


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_raises_an_os_error_instead_of_torchs_error(size):
    """`torch.save` turns the OSError into a RuntimeError about its archive. tests/system/test_disks.py fills a disk."""
    with pytest.raises(OSError, match="No space left") as error:
        write_state({"w": torch.zeros(size)}, Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC


def test_what_an_interrupted_removal_or_save_leaves_is_hidden_and_the_next_one_deletes_it(saved, monkeypatch):
    def interrupted(path, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(write.shutil, "rmtree", interrupted)
        remove_directory(saved / "step-00000020")
    assert names(saved) == [".step-00000020.deleting", "step-00000010"]
    with pytest.raises(FileNotFoundError):
        remove_directory(saved / "step-00000020")
    leftover = saved / ".step-00000020.saving"
    leftover.mkdir()
    (leftover / "other").write_text("of a killed save")
    assert names(save(saved, 20)) == [MANIFEST, STATE]
    remove_directory(saved / "step-00000020")
    assert names(saved) == ["step-00000010"] and verify(saved / "step-00000010") is None


def test_a_write_error_keeps_the_old_file_and_leaves_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def refuse(descriptor):
        assert path.read_text() == "old"  # the new content is not visible before it is on the disk
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("os.fsync", refuse)
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


LATE = """
import pathlib, sys, threading
from rankzero.checkpoints.checkpoint_io import BackgroundWriter

BackgroundWriter().start(lambda: (threading.main_thread().join(), pathlib.Path("written").touch()))
sys.exit(3)
"""


def test_a_process_exits_only_after_its_work(cwd):
    environment = {"PYTHONPATH": f"{REPOSITORY}/project"}
    assert subprocess.run([sys.executable, "-c", LATE], cwd=cwd, env=environment, timeout=60).returncode == 3
    assert (cwd / "written").exists()


class MadeOnPickling:
    """Creates its tensor only when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return torch.clone, (torch.full((1000,), self.value),)


def test_memory_is_reused_for_a_copy_of_the_same_size_but_not_within_a_copy():
    snapshots = Snapshots()
    addresses = {snapshots.take({"w": torch.zeros(1000)})["w"].data_ptr() for _ in range(5)}
    assert len(addresses) == 1
    first, second = (tensor.data_ptr() for tensor in snapshots.take([torch.ones(1000), torch.ones(1000)]))
    assert first != second
    copies = Snapshots().take([MadeOnPickling(float(value)) for value in range(50)])
    assert [copy[0].item() for copy in copies] == list(range(50))
