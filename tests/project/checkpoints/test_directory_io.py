import json

import pytest
import torch

from project.checkpoints.directory_io import (
    MANIFEST,
    STATE,
    DirectoryCheckpointIO,
    checkpoints_in,
    newest_valid,
    read_manifest,
    verify,
)


@pytest.fixture
def saved(tmp_path):
    for step in (10, 20):
        content = {"epoch": 1, "global_step": step, "w": torch.full((3,), step), "rankzero": {"run": "x"}}
        DirectoryCheckpointIO().save_checkpoint(content, tmp_path / f"step-{step:08d}")
    return tmp_path


def test_what_is_saved_is_read_again(saved):
    path = saved / "step-00000020"
    assert torch.equal(DirectoryCheckpointIO().load_checkpoint(path)["w"], torch.full((3,), 20))
    manifest = read_manifest(path)
    assert (manifest["epoch"], manifest["step"], manifest["rankzero"]) == (1, 20, {"run": "x"})
    assert [entry.name for entry in sorted(path.iterdir())] == [MANIFEST, STATE]
    assert [entry.name for entry in checkpoints_in(saved)] == ["step-00000010", "step-00000020"]


def test_the_newest_comes_first(saved):
    assert newest_valid(saved) == (saved / "step-00000020", [])


def test_saving_the_same_step_again_replaces_it(saved):
    DirectoryCheckpointIO().save_checkpoint({"w": 5}, saved / "step-00000020")
    assert DirectoryCheckpointIO().load_checkpoint(saved / "step-00000020") == {"w": 5}
    assert len(list(saved.iterdir())) == 2


def damage(path, how):
    state, manifest = path / STATE, path / MANIFEST
    if how == "truncated":
        state.write_bytes(state.read_bytes()[:-1])
    elif how == "one bit":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif how == "no state":
        state.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif how == "unknown format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))


HOW = ["truncated", "one bit", "no state", "no manifest", "half a manifest", "unknown format"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_checkpoint_is_passed_over_and_named(saved, how):
    damage(saved / "step-00000020", how)
    newest, refused = newest_valid(saved)
    assert newest == saved / "step-00000010"
    assert len(refused) == 1 and "step-00000020" in refused[0]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_checkpoint_is_not_read(saved, how):
    damage(saved / "step-00000020", how)
    with pytest.raises((ValueError, FileNotFoundError)):
        DirectoryCheckpointIO().load_checkpoint(saved / "step-00000020")


def test_one_that_is_being_written_is_none(saved):
    (saved / "step-00000020").rename(saved / ".step-00000030.saving")
    assert newest_valid(saved) == (saved / "step-00000010", [])


def test_a_name_in_the_manifest_leads_nowhere_else(saved):
    manifest = saved / "step-00000020" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["../../../etc/passwd"] = content["files"].pop(STATE)
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="missing"):
        verify(saved / "step-00000020")


def test_a_ckpt_is_one_file_as_lightnings_own(tmp_path):
    plugin = DirectoryCheckpointIO()
    plugin.save_checkpoint({"w": 5}, tmp_path / "best.ckpt")
    assert (tmp_path / "best.ckpt").is_file() and plugin.load_checkpoint(tmp_path / "best.ckpt") == {"w": 5}
    plugin.remove_checkpoint(tmp_path / "best.ckpt")
    assert not list(tmp_path.iterdir())


def test_what_runs_code_is_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    DirectoryCheckpointIO().save_checkpoint({"w": Evil()}, tmp_path / "step-00000001")
    with pytest.raises(Exception, match="[Ww]eights"):
        DirectoryCheckpointIO().load_checkpoint(tmp_path / "step-00000001")
