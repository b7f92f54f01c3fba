import json
import shutil
import subprocess
import sys

import pytest

from rankzero.runs.checkpoints.write import write_directory
from rankzero.runs.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    checkpoints_in,
    clean,
    manifest_text,
    newest_valid,
    read_manifest,
    verify,
)
from running import REPOSITORY


@pytest.fixture
def saved(tmp_path):
    for step in (10, 20):
        write_directory({"global_step": step}, tmp_path / f"step-{step:08d}")
    return tmp_path


def test_the_newest_comes_first(saved):
    assert newest_valid(saved) == (saved / "step-00000020", [])


def test_steps_are_in_order_and_a_replaced_one_comes_before_its_own(tmp_path):
    order = ["step-9", "step-00000010", "step-11.replaced", "step-11", "step-100000000"]
    for name in (*reversed(order), "step-x", "step-", "step-5.saving", ".step-6.saving", "step-7 ", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == order


def test_any_plain_content_is_sealed_and_read_again(saved):
    record = {"text": 'ä\n"\ud800', 5: [1.5, None, True, -(10**30)], "10": {}, "9": 1e-300}
    write_directory({"global_step": 7, "rankzero": record}, saved / "step-7")
    assert read_manifest(saved / "step-7")["rankzero"] == json.loads(json.dumps(record))


@pytest.mark.parametrize("record", [{"x": float("nan")}, {"x": {1, 2}}, {"x": float("inf")}])
def test_what_json_cannot_say_is_refused_when_it_is_saved(saved, record):
    with pytest.raises((TypeError, ValueError)):
        write_directory({"rankzero": record}, saved / "step-7")
    assert len(list(saved.iterdir())) == 2


def damage(path, how):
    state, manifest = path / STATE, path / MANIFEST
    if how == "truncated":
        state.write_bytes(state.read_bytes()[:-1])
    elif how == "longer":
        state.write_bytes(state.read_bytes() + b"x")
    elif how == "sha256 differs":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif how == "state.pt is missing":
        state.unlink()
    elif how == "No such file":
        manifest.unlink()
    elif how == "cannot be read":
        manifest.write_text(manifest.read_text()[:40])
    elif how == f"is of format 99; this version knows format {FORMAT}":
        manifest.write_text(manifest_text({**read_manifest(path), "format": 99}))


HOW = ["truncated", "longer", "sha256 differs", "state.pt is missing", "No such file", "cannot be read"]
HOW += [f"is of format 99; this version knows format {FORMAT}"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_checkpoint_is_passed_over_and_the_message_says_how(saved, how):
    damage(saved / "step-00000020", how)
    newest, refused = newest_valid(saved)
    assert newest == saved / "step-00000010"
    assert len(refused) == 1 and "step-00000020" in refused[0] and how in refused[0]


def test_a_checkpoint_of_an_earlier_version_is_told_from_a_damaged_one(saved):
    old = {"format": 2, "epoch": 1, "step": 20, "rankzero": {}, "files": {}}
    (saved / "step-00000020" / MANIFEST).write_text(json.dumps(old, indent=2))
    with pytest.raises(ValueError, match=f"is of format 2; this version knows format {FORMAT}"):
        verify(saved / "step-00000020")


def test_one_that_is_being_written_is_none(saved):
    (saved / "step-00000020").rename(saved / ".step-00000030.saving")
    assert newest_valid(saved) == (saved / "step-00000010", [])


def test_no_folder_has_no_checkpoints(tmp_path):
    assert newest_valid(tmp_path / "none") == (None, []) and clean(tmp_path / "none") == []


def test_cleaning_takes_what_nothing_needs(saved):
    shutil.copytree(saved / "step-00000020", saved / "step-00000020.replaced")
    shutil.copytree(saved / "step-00000020", saved / "step-00000030.replaced")
    ours = [".step-00000030.saving", ".step-00000005.deleting", ".step-00000005.replaced.deleting"]
    theirs = [".step-x.saving", ".other", "step-00000040"]
    for name in (*ours, *theirs):
        (saved / name).mkdir()
    assert {path.name for path in clean(saved)} == {*ours, "step-00000020.replaced"}
    kept = {*theirs, "step-00000010", "step-00000020", "step-00000030.replaced"}
    assert {path.name for path in saved.iterdir()} == kept
    verify(newest_valid(saved)[0])


def test_manifests_are_read_without_torch():
    code = "import sys, rankzero.runs.checkpoints.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
