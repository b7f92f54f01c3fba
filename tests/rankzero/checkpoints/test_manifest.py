import json
import os
import random
import shutil

import pytest

from rankzero.checkpoints import manifest
from rankzero.checkpoints.manifest import FORMAT, MANIFEST, STATE, manifest_text, newest_valid, read_manifest


def test_checkpoints_are_sorted_by_step_and_a_replaced_one_precedes_its_replacement(tmp_path):
    order = ["step-9", "step-00000010", "step-11.replaced", "step-11", "step-100000000"]
    for name in (*reversed(order), "step-x", "step-", "step-5.saving", ".step-6.saving", "step-7 ", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in manifest.checkpoints_in(tmp_path)] == order


def changed(path, change):
    path.write_bytes(change(path.read_bytes()))


def with_format(path, version):
    (path / MANIFEST).write_text(manifest_text({**read_manifest(path), "format": version}))


OLD = {"format": 2, "epoch": 1, "step": 20, "rankzero": {}, "files": {}}
DAMAGES = {
    "truncated": lambda path: changed(path / STATE, lambda data: data[:-1]),
    "longer": lambda path: changed(path / STATE, lambda data: data + b"x"),
    "another sha256": lambda path: changed(path / STATE, lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]),
    "state.pt is missing": lambda path: (path / STATE).unlink(),
    "No such file": lambda path: (path / MANIFEST).unlink(),
    "cannot be read": lambda path: changed(path / MANIFEST, lambda data: data[:40]),
    f"has format 99; this version reads format {FORMAT}": lambda path: with_format(path, 99),
    f"has format 2; this version reads format {FORMAT}": lambda path: (path / MANIFEST).write_text(json.dumps(OLD)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_the_message_states_the_damage(saved, damage):
    assert newest_valid(saved) == (saved / "step-00000020", [])
    DAMAGES[damage](saved / "step-00000020")
    newest, refusals = newest_valid(saved)
    assert newest == saved / "step-00000010"
    assert len(refusals) == 1 and "step-00000020" in refusals[0] and damage in refusals[0]


def test_clean_removes_only_leftovers_of_saves_and_removals(saved):
    assert newest_valid(saved / "none") == (None, []) and manifest.clean(saved / "none") == []
    shutil.copytree(saved / "step-00000020", saved / "step-00000020.replaced")
    shutil.copytree(saved / "step-00000020", saved / "step-00000030.replaced")
    leftovers = [".step-00000030.saving", ".step-00000005.deleting", ".step-00000005.replaced.deleting"]
    unrelated = [".step-x.saving", ".other", "step-00000040"]
    for name in (*leftovers, *unrelated):
        (saved / name).mkdir()
    assert {path.name for path in manifest.clean(saved)} == {*leftovers, "step-00000020.replaced"}
    kept = {*unrelated, "step-00000010", "step-00000020", "step-00000030.replaced"}
    assert {path.name for path in saved.iterdir()} == kept
    manifest.verify(newest_valid(saved)[0])


def test_a_manifest_truncated_at_any_byte_or_with_other_formatting_is_refused(valid_checkpoint, refusal_of):
    text = (valid_checkpoint / MANIFEST).read_text()
    for size in range(len(text)):
        (valid_checkpoint / MANIFEST).write_text(text[:size])
        refusal_of(valid_checkpoint)
    content = json.loads(text)
    for formatted in (json.dumps(content), json.dumps(content, indent=2, sort_keys=True) + "\n\n"):
        (valid_checkpoint / MANIFEST).write_text(formatted)
        assert "differs from the file that was written" in refusal_of(valid_checkpoint)


def test_one_flipped_bit_in_any_file_is_refused(valid_checkpoint, refusal_of):
    generator = random.Random(5)
    for _ in range(200):
        file = valid_checkpoint / generator.choice([STATE, MANIFEST])
        content = file.read_bytes()
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(changed)
        refusal_of(valid_checkpoint)
        file.write_bytes(content)
    manifest.verify(valid_checkpoint)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b'{"format": 3.0}', b'{"format": NaN}'])
def test_a_file_that_is_not_a_manifest_is_refused(valid_checkpoint, content, refusal_of):
    (valid_checkpoint / MANIFEST).write_bytes(content)
    assert MANIFEST in refusal_of(valid_checkpoint)


CHANGES = [
    *({"files": files} for files in ([], {}, {"../x": {"bytes": 1, "sha256": "0"}})),
    *({"x": 1}, {"without": ["needs"]}),
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_valid_checksum_of_other_entries_is_refused(valid_checkpoint, change, refusal_of, write_manifest):
    write_manifest(valid_checkpoint, **change)
    assert "other entries" in refusal_of(valid_checkpoint)


KINDS = {
    "link": lambda file, moved: file.symlink_to(moved),
    "dangling link": lambda file, moved: file.symlink_to("nothing"),
    "pipe": lambda file, moved: os.mkfifo(file),
    "directory": lambda file, moved: file.mkdir(),
    "nothing": lambda file, moved: None,
}


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_or_manifest_that_is_not_a_regular_file_is_refused(valid_checkpoint, tmp_path, name, kind, refusal_of):
    KINDS[kind](valid_checkpoint / name, (valid_checkpoint / name).rename(tmp_path / "moved"))
    assert name in refusal_of(valid_checkpoint)
