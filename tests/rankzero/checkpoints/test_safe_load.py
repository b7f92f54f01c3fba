"""Malformed and malicious checkpoints: each is refused with a message, and none runs code."""

import io
import pickle
import random
import struct
import zipfile

import pytest
import torch
from checkpoint_files import CreatesFolder, load, serialized

from rankzero.checkpoints.manifest import MANIFEST, STATE, verify
from rankzero.messages import CannotStart
from running import TOY, evaluate_in_process, fit, fit_in_process


@pytest.mark.parametrize("kind", ["directory", "ckpt"])
def test_only_code_in_a_trusted_pickle_runs(valid_checkpoint, tmp_path, kind, message_of, write_manifest):
    marker, path = tmp_path / "ran", valid_checkpoint if kind == "directory" else tmp_path / "some.ckpt"
    state = serialized({"state_dict": {}, "loops": CreatesFolder(marker)})
    if kind == "directory":
        write_manifest(path, state, needs=[])
        verify(path)
    else:
        path.write_bytes(state)
    message = message_of(path)
    assert "os.makedirs" in message and "can run any code" in message and "--trust_checkpoint yes" in message
    assert not marker.exists()
    load(path, trusted=True)
    assert marker.exists()


def test_a_file_that_is_no_archive_or_no_dict_or_has_many_classes_is_refused_briefly(tmp_path, message_of):
    marker, path = tmp_path / "ran", tmp_path / "x.ckpt"
    path.write_bytes(pickle.dumps({"w": CreatesFolder(marker)}))
    assert "not a zip archive" in message_of(path)
    torch.save({"w": CreatesFolder(marker)}, path, _use_new_zipfile_serialization=False)
    assert "not a zip archive" in message_of(path) and not marker.exists()
    for content in (torch.ones(3), [1, 2], "text", None):
        path.write_bytes(serialized(content))
        assert "a checkpoint is a dict" in message_of(path)
    control_characters = b"".join(b"cm\x1b[2J%i\nKind\n" % i for i in range(30))
    content = {"data.pkl": b"\x80\x02(" + control_characters + b"t.", "version": b"3\n", "byteorder": b"little"}
    path.write_bytes(archive(content))
    assert "and 22 more" in message_of(path)


def test_a_state_truncated_at_many_positions_is_refused(valid_checkpoint, message_of, refusal_of, write_manifest):
    content = (valid_checkpoint / STATE).read_bytes()
    manifest = (valid_checkpoint / MANIFEST).read_bytes()
    ckpt = valid_checkpoint.parent / "x.ckpt"
    for size in sorted({0, 1, 4, 21, 22, 23, len(content) - 1, *range(0, len(content), 97)}):
        (valid_checkpoint / STATE).write_bytes(content[:size])
        assert "truncated" in refusal_of(valid_checkpoint)
        write_manifest(valid_checkpoint)
        message_of(valid_checkpoint)
        ckpt.write_bytes(content[:size])
        message_of(ckpt)
        (valid_checkpoint / MANIFEST).write_bytes(manifest)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_with_a_flipped_bit_is_read_or_refused_with_a_message(valid_checkpoint, tmp_path):
    generator = random.Random(6)
    content, path = (valid_checkpoint / STATE).read_bytes(), tmp_path / "x.ckpt"
    refused = 0
    for _ in range(200):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        try:
            load(path)
        except CannotStart as error:
            assert "x.ckpt" in str(error)
            refused += 1
    assert refused > 20


def archive(entries: dict[str, bytes], compression=zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


@pytest.fixture
def refuse_both(valid_checkpoint, message_of, write_manifest):
    """Returns a function that checks that a state is refused with and without a manifest, and returns the message."""

    def read(state: bytes) -> str:
        write_manifest(valid_checkpoint, state)
        (valid_checkpoint.parent / "x.ckpt").write_bytes(state)
        message_of(valid_checkpoint.parent / "x.ckpt")
        return message_of(valid_checkpoint)

    return read


@pytest.mark.system
def test_a_zip_bomb_of_zeros_is_refused(refuse_both):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(1 << 6):
                entry.write(bytes(1 << 24))
        file.writestr("archive/data.pkl", serialized({})[:100])
    assert len(buffer.getvalue()) < 2_000_000
    assert "compressed" in refuse_both(buffer.getvalue())


def test_a_zip_bomb_of_entries_that_overlap_is_refused(refuse_both):
    """Each of a thousand entries claims the same bytes."""
    content = bytearray(archive({"data/0": bytes(100_000)}))
    end = content.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", content, end + 16)[0]
    record = bytes(content[start:end])
    records = b"".join(record.replace(b"data/0", f"dat{i:03}".encode()) for i in range(1000))
    finish = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(records), start, 0)
    assert "overlap" in refuse_both(bytes(content[:start]) + records + finish)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_outside_the_archive_duplicate_ones_and_data_after_it_are_refused(valid_checkpoint, refuse_both):
    state = (valid_checkpoint / STATE).read_bytes()
    for name in ("../../x", "/etc/x", ""):
        buffer = io.BytesIO(state)
        with zipfile.ZipFile(buffer, "a") as file:
            file.writestr(name or file.namelist()[0], b"another")
        assert ("outside the archive" if name else "duplicate entries") in refuse_both(buffer.getvalue())
    refuse_both(archive({"x": bytes(10)}) + b"trailing")
    assert "not a zip archive" in refuse_both(state + b"PK\x05\x06" + bytes(16) + b"\5\0hello")


PICKLES = {
    "empty": b"",
    "endless": b"\x80\x02" + b"]q\x00" + b"h\x00a" * 50 + b"X\xff\xff\xff\xff.",
    "deep": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "a storage larger than its entry": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpu\x8a\x06\x00\x00\x00\x00\x00\x7ftQ.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_malformed_pickle_is_refused_in_a_rebuilt_archive(valid_checkpoint, name, refuse_both, write_manifest):
    with zipfile.ZipFile(valid_checkpoint / STATE) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    write_manifest(valid_checkpoint, archive(entries))
    assert load(valid_checkpoint)["state_dict"]["w"].tolist() == list(range(64))
    refuse_both(archive({**entries, "data.pkl": PICKLES[name]}))


@pytest.mark.system
def test_a_refused_checkpoint_prints_a_message_without_a_traceback(finished, cwd):
    finished()
    bomb = archive({"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    (cwd / "bomb.ckpt").write_bytes(bomb)
    result = fit(*TOY, "--epochs", "2", "--resume", "bomb.ckpt", folder=cwd, code=2)
    assert result.err.startswith("rankzero: cannot start\n  asked  the checkpoint ")
    assert "Traceback" not in result.out + result.err
    assert [path.name for path in (cwd / "runs").iterdir()] == ["x"]


def test_a_class_that_is_no_module_in_a_valid_manifest_is_refused(finished, write_manifest):
    run = finished() / "checkpoints/step-00000064"
    write_manifest(run, rankzero={"run": "x", "config": {"model": {"class_path": "os.mkdir"}}})
    with pytest.raises(CannotStart):
        evaluate_in_process("--checkpoint", str(run))
    with pytest.raises(CannotStart):
        fit_in_process(*TOY, "--epochs", "2", "--run", "y", "--resume", str(run))
