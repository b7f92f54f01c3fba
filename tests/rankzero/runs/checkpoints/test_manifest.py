import json
import os
import random
import shutil
import subprocess
import sys

import pytest

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
from rankzero.runs.checkpoints.write import write_directory
from running import REPOSITORY


@pytest.fixture
def saved(tmp_path):
    for step in (10, 20):
        write_directory({"global_step": step}, tmp_path / f"step-{step:08d}")
    return tmp_path


def test_newest_valid_returns_the_newest_checkpoint(saved):
    assert newest_valid(saved) == (saved / "step-00000020", [])


def test_checkpoints_are_sorted_by_step_and_a_replaced_one_precedes_its_replacement(tmp_path):
    order = ["step-9", "step-00000010", "step-11.replaced", "step-11", "step-100000000"]
    for name in (*reversed(order), "step-x", "step-", "step-5.saving", ".step-6.saving", "step-7 ", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == order


def test_any_json_content_survives_writing_and_reading_a_manifest(saved):
    record = {"text": 'ä\n"\ud800', 5: [1.5, None, True, -(10**30)], "10": {}, "9": 1e-300}
    write_directory({"global_step": 7, "rankzero": record}, saved / "step-7")
    assert read_manifest(saved / "step-7")["rankzero"] == json.loads(json.dumps(record))


def damage_checkpoint(path, damage):
    state, manifest = path / STATE, path / MANIFEST
    if damage == "truncated":
        state.write_bytes(state.read_bytes()[:-1])
    elif damage == "longer":
        state.write_bytes(state.read_bytes() + b"x")
    elif damage == "another sha256":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif damage == "state.pt is missing":
        state.unlink()
    elif damage == "No such file":
        manifest.unlink()
    elif damage == "cannot be read":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == f"has format 99; this version reads format {FORMAT}":
        manifest.write_text(manifest_text({**read_manifest(path), "format": 99}))


DAMAGES = ["truncated", "longer", "another sha256", "state.pt is missing", "No such file", "cannot be read"]
DAMAGES += [f"has format 99; this version reads format {FORMAT}"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_the_message_states_the_damage(saved, damage):
    damage_checkpoint(saved / "step-00000020", damage)
    newest, refusals = newest_valid(saved)
    assert newest == saved / "step-00000010"
    assert len(refusals) == 1 and "step-00000020" in refusals[0] and damage in refusals[0]


def test_the_error_for_a_checkpoint_of_an_earlier_version_names_both_formats(saved):
    old = {"format": 2, "epoch": 1, "step": 20, "rankzero": {}, "files": {}}
    (saved / "step-00000020" / MANIFEST).write_text(json.dumps(old, indent=2))
    with pytest.raises(ValueError, match=f"has format 2; this version reads format {FORMAT}"):
        verify(saved / "step-00000020")


def test_a_checkpoint_that_is_being_written_is_ignored(saved):
    (saved / "step-00000020").rename(saved / ".step-00000030.saving")
    assert newest_valid(saved) == (saved / "step-00000010", [])


def test_a_missing_folder_has_no_checkpoints(tmp_path):
    assert newest_valid(tmp_path / "none") == (None, []) and clean(tmp_path / "none") == []


def test_clean_removes_only_leftovers_of_saves_and_removals(saved):
    shutil.copytree(saved / "step-00000020", saved / "step-00000020.replaced")
    shutil.copytree(saved / "step-00000020", saved / "step-00000030.replaced")
    leftovers = [".step-00000030.saving", ".step-00000005.deleting", ".step-00000005.replaced.deleting"]
    unrelated = [".step-x.saving", ".other", "step-00000040"]
    for name in (*leftovers, *unrelated):
        (saved / name).mkdir()
    assert {path.name for path in clean(saved)} == {*leftovers, "step-00000020.replaced"}
    kept = {*unrelated, "step-00000010", "step-00000020", "step-00000030.replaced"}
    assert {path.name for path in saved.iterdir()} == kept
    verify(newest_valid(saved)[0])


def test_the_manifest_module_does_not_import_torch():
    code = "import sys, rankzero.runs.checkpoints.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_a_manifest_truncated_at_any_byte_is_refused(valid_checkpoint, refusal_of):
    content = (valid_checkpoint / MANIFEST).read_bytes()
    for size in range(len(content)):
        (valid_checkpoint / MANIFEST).write_bytes(content[:size])
        refusal_of(valid_checkpoint)


def test_one_flipped_bit_in_any_file_is_refused(valid_checkpoint, refusal_of):
    generator = random.Random(5)
    files = [valid_checkpoint / STATE, valid_checkpoint / MANIFEST]
    for _ in range(200):
        file = generator.choice(files)
        content = file.read_bytes()
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(changed)
        refusal_of(valid_checkpoint)
        file.write_bytes(content)
    verify(valid_checkpoint)


MANIFESTS = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"3",
    "no json": b"{'format': 3}",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep within": b'{"format": 3, "x": ' + b"[" * 990 + b"]" * 990 + b"}",
    "a huge number": b'{"format": ' + b"9" * 100_000 + b"}",
    "a large number": b'{"format": ' + b"9" * 4000 + b"}",
    "not a number": b'{"format": NaN}',
    "not a number within": b'{"format": 3, "x": NaN}',
    "a fraction": b'{"format": 3.0}',
    "true": b'{"format": true}',
    "a key twice": b'{"format": 3, "format": 3}',
    "null": b"null",
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_file_that_is_not_a_manifest_is_refused(valid_checkpoint, name, refusal_of):
    (valid_checkpoint / MANIFEST).write_bytes(MANIFESTS[name])
    assert MANIFEST in refusal_of(valid_checkpoint)


CHANGES = {
    "files is a list": {"files": []},
    "no files": {"files": {}},
    "a file too many": {"files": {STATE: {"bytes": 1, "sha256": ""}, "x": {"bytes": 1, "sha256": ""}}},
    "bytes is text": {"files": {STATE: {"bytes": "9", "sha256": ""}}},
    "bytes is true": {"files": {STATE: {"bytes": True, "sha256": ""}}},
    "bytes is negative": {"files": {STATE: {"bytes": -1, "sha256": ""}}},
    "bytes is huge": {"files": {STATE: {"bytes": 10**400, "sha256": ""}}},
    "sha256 is a number": {"files": {STATE: {"bytes": 9, "sha256": 3}}},
    "no sha256": {"files": {STATE: {"bytes": 9}}},
    "a description that is none": {"files": {STATE: None}},
    "an epoch that is text": {"epoch": "1"},
    "a step that is a fraction": {"step": 1.5},
    "needs that are text": {"needs": "none"},
    "contents that are numbers": {"contents": [1]},
    "a run that is a list": {"rankzero": []},
    "more than it should say": {"x": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_invalid_field_in_a_manifest_with_a_valid_checksum_is_refused(
    valid_checkpoint, name, refusal_of, write_manifest
):
    write_manifest(valid_checkpoint, **CHANGES[name])
    assert MANIFEST in refusal_of(valid_checkpoint) or STATE in refusal_of(valid_checkpoint)


@pytest.mark.parametrize("missing_field", ["epoch", "step", "rankzero", "contents", "needs", "files"])
def test_a_missing_field_in_a_manifest_with_a_valid_checksum_is_refused(valid_checkpoint, missing_field, refusal_of):
    content = {
        key: value for key, value in read_manifest(valid_checkpoint).items() if key not in (missing_field, "sha256")
    }
    (valid_checkpoint / MANIFEST).write_text(manifest_text(content))
    refusal_of(valid_checkpoint)


@pytest.mark.parametrize("name", ["../x", "../../../etc/passwd", "/etc/passwd", "a/b", ".", "..", "", "x\0y"])
def test_a_file_name_other_than_state_pt_is_refused(valid_checkpoint, name, refusal_of, write_manifest):
    write_manifest(valid_checkpoint, files={name: {"bytes": 1, "sha256": "0"}})
    assert "instead of only state.pt" in refusal_of(valid_checkpoint)


def test_a_manifest_with_other_formatting_is_refused(valid_checkpoint, refusal_of):
    content = json.loads((valid_checkpoint / MANIFEST).read_text())
    for text in (json.dumps(content), json.dumps(content, indent=2, sort_keys=True) + "\n\n"):
        (valid_checkpoint / MANIFEST).write_text(text)
        assert "differs from the file that was written" in refusal_of(valid_checkpoint)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory", "nothing"])
def test_a_state_or_manifest_that_is_not_a_regular_file_is_refused(valid_checkpoint, tmp_path, name, kind, refusal_of):
    file = valid_checkpoint / name
    moved = file.rename(tmp_path / "moved")
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "dangling link":
        file.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    assert name in refusal_of(valid_checkpoint)
