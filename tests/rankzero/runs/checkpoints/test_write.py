"""A checkpoint is written completely or not at all, even if the save is interrupted."""

import errno
import hashlib
import io
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_files import names, save, serialized

from rankzero.runs.checkpoints import write
from rankzero.runs.checkpoints.manifest import MANIFEST, STATE, clean, newest_valid, read_manifest, verify
from rankzero.runs.checkpoints.safe_load import load
from rankzero.runs.checkpoints.write import HashedFile, _move_to_target, remove_directory, write_directory, write_state


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


@pytest.mark.parametrize("blocks", [[], [b""], [b"ab", bytearray(b"c"), memoryview(b"de")], [b"x" * 100_000] * 3])
def test_a_hashed_file_counts_and_hashes_every_block(blocks):
    file = io.BytesIO()
    hashed = HashedFile(file)
    assert [hashed.write(block) for block in blocks] == [len(block) for block in blocks]
    data = b"".join(blocks)
    assert (hashed.bytes, hashed.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert file.getvalue() == data and hashed.error is None


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


def test_manifests_of_unusual_content_are_written(tmp_path):
    """No content, keys that are no text, and a number whose classes torch cannot list."""
    write_directory({}, tmp_path / "step-1")
    manifest = read_manifest(tmp_path / "step-1")
    assert (manifest["epoch"], manifest["step"], manifest["rankzero"]) == (None, None, {})
    assert (manifest["contents"], manifest["needs"]) == ([], [])
    write_directory({3: 1, "b": 2, None: 4}, tmp_path / "step-2")
    assert read_manifest(tmp_path / "step-2")["contents"] == ["3", "None", "b"]
    path = save(tmp_path, 30, large=1 << 9000)
    assert read_manifest(path)["needs"] == ["what torch cannot name"]
    assert load(path, trusted=True)["large"] == 1 << 9000


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_raises_an_os_error_instead_of_torchs_error(size):
    """`torch.save` turns the OSError into a RuntimeError about its archive. tests/system/test_disks.py fills a disk."""
    with pytest.raises(OSError, match="No space left") as error:
        write_state({"w": torch.zeros(size)}, Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC


def completes_before_call(number, task):
    """Runs `task` in a process that exits at the given fsync or rename call; returns whether `task` completed."""
    child = os.fork()
    if child == 0:
        numbers = iter(range(10_000))

        def exit_at_call(call, *arguments):
            if next(numbers) == number:
                os._exit(9)
            return call(*arguments)

        os.fsync, os.rename = partial(exit_at_call, os.fsync), partial(exit_at_call, os.rename)
        try:
            task()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_exits_anywhere_in_a_save_leaves_a_valid_checkpoint(saved):
    is_new_content, number = [], 0
    while not completes_before_call(number, lambda: save(saved, 20, w=7)):
        newest, damaged = newest_valid(saved)
        assert newest.name.startswith("step-00000020") and not damaged
        is_new_content.append(isinstance(load(newest)["w"], int))
        clean(saved)
        save(saved, 20)
        assert names(saved) == ["step-00000010", "step-00000020"]
        number += 1
    assert load(saved / "step-00000020")["w"] == 7
    assert is_new_content == sorted(is_new_content)  # first the old checkpoint, later the new one
    assert set(is_new_content) == {False, True}


def test_a_process_that_exits_anywhere_in_a_removal_leaves_no_damaged_checkpoint(saved):
    number = 0
    while not completes_before_call(number, lambda: remove_directory(saved / "step-00000020")):
        newest, damaged = newest_valid(saved)
        assert newest is not None and not damaged
        clean(saved)
        save(saved, 20)
        number += 1
    assert number > 0 and names(saved) == ["step-00000010"]


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
