"""A checkpoint is written completely or not at all, even if the save is interrupted."""

import errno
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_files import names, save, serialized

from data_modules import Digits
from lightning_modules import ResNet
from rankzero.checkpoints import write
from rankzero.checkpoints.atomic_files import write_text
from rankzero.checkpoints.checkpoint_io import Snapshots
from rankzero.checkpoints.manifest import MANIFEST, STATE, newest_valid, read_manifest, verify
from rankzero.checkpoints.safe_load import load
from rankzero.checkpoints.write import _move_to_target, export_weights, remove_directory, write_directory, write_state
from running import REPOSITORY, evaluate_in_process, fit_in_process, refusal_of, weights


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


def test_a_state_that_cannot_be_read_back_is_a_failed_save(saved, monkeypatch):
    def write_half(checkpoint, path):
        result = write_state(checkpoint, path)
        path.write_bytes(path.read_bytes()[:-60])
        return result

    monkeypatch.setattr(write, "write_state", write_half)
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        save(saved, 30)
    assert names(saved) == ["step-00000010", "step-00000020"]


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
from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO

io = DirectoryCheckpointIO()
io.on_committed = lambda path: (threading.main_thread().join(), pathlib.Path("written").touch())
io.save_checkpoint({"global_step": 1}, "step-00000001")
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
    assert len({snapshots.take({"w": torch.zeros(1000)})["w"].data_ptr() for _ in range(5)}) == 1
    first, second = (tensor.data_ptr() for tensor in snapshots.take([torch.ones(1000), torch.ones(1000)]))
    assert first != second
    copies = Snapshots().take([MadeOnPickling(float(value)) for value in range(50)])
    assert [copy[0].item() for copy in copies] == list(range(50))


LOADERS = {".pt": lambda path: torch.load(path, weights_only=True), ".safetensors": safetensors.torch.load_file}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    fit_in_process("--model", "ResNet", "--data", "Digits", "--epochs", "1", "--root", str(root), "--run", "x")
    return root / "x"


@pytest.mark.parametrize(("suffix", "source"), [(".pt", "run"), (".safetensors", "checkpoint")])
def test_exported_weights_load_into_the_same_model(exported, cwd, capsys, suffix, source):
    flags = ("--root", str(exported.parent), "--run", "x") if source == "run" else ("--checkpoint", str(exported))
    assert evaluate_in_process(*flags, "--export", f"deep/model{suffix}") == 0
    file = cwd / "deep" / f"model{suffix}"
    found, expected = LOADERS[suffix](file), weights(exported)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    sizes = {name: getattr(Digits(), name) for name in ("in_channels", "image_size", "num_classes")}
    (model := ResNet(**sizes)).load_state_dict(found)
    for loaded in (model, ResNet.load_from_checkpoint(max((exported / "checkpoints").iterdir()), **sizes)):
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{len(expected)} tensors" in line and f"{file.stat().st_size:,} bytes" in line
    assert f"{sum(value.numel() for value in expected.values()):,} parameters and buffers" in line
    assert "model.load_state_dict(" in line and [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("suffix", LOADERS)
def test_shared_tensors_and_views_are_exported_and_other_values_only_to_pt(tmp_path, suffix):
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {"embedding": matrix, "head": matrix, "turned": matrix.t(), "part": matrix[1, 1:3]}
    state["none"] = torch.empty(0, 2)
    torch.save({"state_dict": {**state, "_extra_state": {"seen": 3}}}, tmp_path / "x.ckpt")
    assert "5 tensors, 38 parameters" in export_weights(tmp_path / "x.ckpt", tmp_path / f"x{suffix}")
    found = LOADERS[suffix](tmp_path / f"x{suffix}")
    assert found.pop("_extra_state", None) == ({"seen": 3} if suffix == ".pt" else None)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export", "model.onnx"), "ends in .pt or .safetensors"),
        (("--export", "model"), "ends in .pt or .safetensors"),
        (("--export", "/proc/model.pt"), "folder where you may write"),
        (("--export", "x.pt", "--checkpoint", "bare.ckpt"), "contains no weights"),
    ],
)
def test_a_wrong_file_and_a_checkpoint_without_weights_are_refused(exported, cwd, arguments, message):
    torch.save({"epoch": 3}, "bare.ckpt")
    assert message in str(refusal_of(evaluate_in_process, "--root", str(exported.parent), *arguments))
    assert not (cwd / "x.pt").exists()
