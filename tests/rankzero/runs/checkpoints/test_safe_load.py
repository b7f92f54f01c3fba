"""Malformed and malicious checkpoints: each is refused with a message, and none runs code."""

import collections
import io
import os
import pickle
import random
import shutil
import struct
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from rankzero.messages import CannotStart
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import MANIFEST, STATE, verify
from running import evaluate_here, fit, fit_here


def load(path, **options):
    return DirectoryCheckpointIO(**options).load_checkpoint(path)


class Touches:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["directory", "ckpt"])
def test_code_in_a_pickle_runs_only_if_the_checkpoint_is_trusted(good, tmp_path, kind, message_of, seal):
    ran = tmp_path / "ran"
    state = saved({"state_dict": {}, "loops": Touches(ran)})
    path = good
    if kind == "ckpt":
        path = tmp_path / "some.ckpt"
        path.write_bytes(state)
    else:
        seal(good, state, needs=[])
        verify(good)
    said = message_of(path)
    assert "posix.mkdir" in said and "can run any code" in said and "--trust_checkpoint yes" in said
    assert not ran.exists()
    load(path, trusted=True)
    assert ran.exists()


def test_a_pickle_outside_a_zip_archive_is_refused_and_runs_no_code(tmp_path, message_of):
    ran, path = tmp_path / "ran", tmp_path / "legacy.ckpt"
    path.write_bytes(pickle.dumps({"w": Touches(ran)}))
    assert "no zip archive" in message_of(path)
    torch.save({"w": Touches(ran)}, path, _use_new_zipfile_serialization=False)
    assert "no zip archive" in message_of(path) and not ran.exists()


@pytest.mark.parametrize("content", [torch.ones(3), [1, 2], "text", None])
def test_a_file_without_a_dict_is_refused(tmp_path, content, message_of):
    (tmp_path / "x.ckpt").write_bytes(saved(content))
    assert "where a checkpoint holds a dict" in message_of(tmp_path / "x.ckpt")


def test_many_class_names_with_control_characters_give_one_short_message(tmp_path, message_of):
    pickled = b"\x80\x02(" + b"".join(b"cm\x1b[2J%i\nKind\n" % i for i in range(30)) + b"t."
    path = tmp_path / "x.ckpt"
    path.write_bytes(archive({"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}))
    assert "and 22 more" in message_of(path)


def test_the_state_of_a_checkpoint_truncated_at_many_positions_is_refused(good, message_of, refused, seal):
    whole = (good / STATE).read_bytes()
    manifest = (good / MANIFEST).read_bytes()
    ckpt = good.parent / "x.ckpt"
    for size in sorted({0, 1, 4, 21, 22, 23, len(whole) - 1, *range(0, len(whole), 97)}):
        (good / STATE).write_bytes(whole[:size])
        assert "truncated" in refused(good)
        seal(good)
        message_of(good)
        ckpt.write_bytes(whole[:size])
        message_of(ckpt)
        (good / MANIFEST).write_bytes(manifest)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_with_a_flipped_bit_is_read_or_refused_with_a_message(good, tmp_path):
    chance = random.Random(6)
    whole, path = (good / STATE).read_bytes(), tmp_path / "x.ckpt"
    outcomes = collections.Counter()
    for _ in range(200):
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            load(path)
        except CannotStart as error:
            assert "x.ckpt" in str(error)
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert outcomes["refused"] > 20 and outcomes.total() == 200


def test_a_pipe_or_a_file_in_place_of_a_checkpoint_is_refused(good, tmp_path, message_of, refused):
    shutil.rmtree(good)
    os.mkfifo(good)
    message_of(good)
    good.unlink()
    good.write_text("x")
    refused(good)
    os.mkfifo(tmp_path / "x.ckpt")
    message_of(tmp_path / "x.ckpt")


def archive(entries: dict[str, bytes], compression=zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def entries_of(state: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(state)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


@pytest.fixture
def both(message_of, seal):
    """Returns a function that checks that a state is refused with and without a manifest, and returns the message."""

    def read(good: Path, state: bytes) -> str:
        seal(good, state)
        (good.parent / "x.ckpt").write_bytes(state)
        message_of(good.parent / "x.ckpt")
        return message_of(good)

    return read


def test_a_rebuilt_archive_with_unchanged_entries_is_read(good, seal):
    state = archive(entries_of((good / STATE).read_bytes()))
    seal(good, state)
    assert load(good)["state_dict"]["w"].tolist() == list(range(64))


@pytest.mark.system
def test_a_zip_bomb_of_zeros_is_refused(good, both):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(1 << 6):
                entry.write(bytes(1 << 24))
        file.writestr("archive/data.pkl", saved({})[:100])
    assert len(buffer.getvalue()) < 2_000_000
    assert "compressed" in both(good, buffer.getvalue())


def test_a_zip_bomb_of_entries_that_overlap_is_refused(good, both):
    """Each of a thousand entries claims the same bytes."""
    whole = bytearray(archive({"data/0": bytes(100_000)}))
    end = whole.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", whole, end + 16)[0]
    record = bytes(whole[start:end])
    records = b"".join(record.replace(b"data/0", f"dat{i:03}".encode()) for i in range(1000))
    finish = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(records), start, 0)
    assert "overlap" in both(good, bytes(whole[:start]) + records + finish)


@pytest.mark.parametrize("name", ["../../x", "/etc/x"])
def test_an_archive_entry_with_an_outside_path_is_refused(good, name, both):
    buffer = io.BytesIO((good / STATE).read_bytes())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(name, b"x")
    assert "outside of itself" in both(good, buffer.getvalue())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_duplicate_archive_entry_is_refused(good, both):
    buffer = io.BytesIO((good / STATE).read_bytes())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(file.namelist()[0], b"another")
    assert "twice" in both(good, buffer.getvalue())


def test_data_after_the_archive_is_refused(good, both):
    both(good, archive({"x": bytes(10)}) + b"trailing")
    assert "no zip archive" in both(good, (good / STATE).read_bytes() + b"PK\x05\x06" + bytes(16) + b"\5\0hello")


PICKLES = {
    "empty": b"",
    "stop": b".",
    "endless": b"\x80\x02" + b"]q\x00" + b"h\x00a" * 50 + b"X\xff\xff\xff\xff.",
    "deep": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "deeper": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "no such key": b"\x80\x02h\x05.",
    "a large array": b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x7f\x85R.",
    "a storage that is not there": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x007"
    b"X\x03\x00\x00\x00cpuK\x04tQ.",
    "a storage larger than its entry": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpu\x8a\x06\x00\x00\x00\x00\x00\x7ftQ.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_malformed_pickle_is_refused(good, name, both):
    entries = entries_of((good / STATE).read_bytes())
    both(good, archive({**entries, "data.pkl": PICKLES[name]}))


TOY = ("--model", "MLP", "--data", "Toy")


@pytest.fixture
def run(here):
    fit_here(*TOY, "--epochs", "1", "--run", "x")
    return here / "runs/x/checkpoints/step-00000064"


@pytest.fixture
def with_code(seal):
    """Returns a function that puts code into a checkpoint and writes a valid manifest for it."""

    def put(checkpoint: Path, ran: Path) -> None:
        content = torch.load(checkpoint / STATE, weights_only=True)
        seal(checkpoint, saved({**content, "extra": Namespace(touched=Touches(ran))}))

    return put


def test_fit_and_evaluate_refuse_a_checkpoint_with_code_and_name_trust_checkpoint(run, here, capsys, with_code):
    with_code(run, here / "ran")
    for work in (
        lambda: fit_here(*TOY, "--epochs", "2", "--run", "y", "--resume", str(run)),
        lambda: fit_here(*TOY, "--epochs", "2", "--run", "x"),
        lambda: evaluate_here("--checkpoint", str(run)),
        lambda: evaluate_here("--run", "x", "--export", "x.pt"),
    ):
        with pytest.raises(CannotStart, match=r"posix\.mkdir(.|\n)*--trust_checkpoint yes"):
            work()
    assert not (here / "ran").exists() and not (here / "runs/y").exists() and not (here / "x.pt").exists()
    assert evaluate_here("--checkpoint", str(run), "--trust_checkpoint", "yes") == 0
    assert (here / "ran").exists()


def test_a_run_resumes_from_a_checkpoint_with_code_if_trusted(run, here, with_code):
    with_code(run, here / "ran")
    assert fit_here(*TOY, "--epochs", "2", "--run", "x", "--trust_checkpoint", "yes") == 0
    assert "trust" not in (here / "runs/x/config.yaml").read_text()


@pytest.mark.system
def test_a_refused_checkpoint_prints_a_message_without_a_traceback(run, here):
    bomb = archive({"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    (here / "bomb.ckpt").write_bytes(bomb)
    result = fit(*TOY, "--epochs", "2", "--resume", "bomb.ckpt", folder=here, code=2)
    assert result.err.startswith("rankzero: cannot start\n  asked  the checkpoint ")
    assert "Traceback" not in result.out + result.err
    assert [path.name for path in (here / "runs").iterdir()] == ["x"]
