"""Checkpoints that somebody made to do harm, or a disk did: each is refused, with a message, and runs nothing."""

import collections
import hashlib
import io
import json
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
from rankzero.runs.checkpoints.manifest import MANIFEST, STATE, manifest_text, newest_valid, read_manifest, verify
from rankzero.runs.checkpoints.write import write_directory
from running import evaluate_here, fit, fit_here


@pytest.fixture
def good(tmp_path):
    content = {"epoch": 1, "global_step": 20, "state_dict": {"w": torch.arange(64.0)}, "rankzero": {"run": "x"}}
    write_directory(content, tmp_path / "step-00000020")
    return tmp_path / "step-00000020"


def load(path, **options):
    return DirectoryCheckpointIO(**options).load_checkpoint(path)


def message_of(path, **options):
    """What is said instead of reading a checkpoint."""
    with pytest.raises(ValueError) as error:
        load(path, **options)
    assert isinstance(error.value, CannotStart) and path.name in str(error.value)
    assert len(str(error.value)) < 1500 and "\x1b" not in str(error.value)
    return str(error.value)


def refused(path):
    """Why a checkpoint is not carried on from; it is not read either."""
    message_of(path)
    newest, reasons = newest_valid(path.parent)
    assert newest is None and len(reasons) == 1 and path.name in reasons[0]
    return reasons[0]


def seal(path, state: bytes | None = None, **changes):
    """Makes the manifest a valid one, as an attacker would."""
    if state is not None:
        (path / STATE).write_bytes(state)
    data = (path / STATE).read_bytes()
    described = {STATE: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    content = {key: value for key, value in read_manifest(path).items() if key != "sha256"}
    (path / MANIFEST).write_text(manifest_text({**content, "files": described, **changes}))


class Touches:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["directory", "ckpt"])
def test_code_in_a_pickle_does_not_run(good, tmp_path, kind):
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


def test_a_pickle_without_its_zip_does_not_run(tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "legacy.ckpt"
    path.write_bytes(pickle.dumps({"w": Touches(ran)}))
    assert "no zip archive" in message_of(path)
    torch.save({"w": Touches(ran)}, path, _use_new_zipfile_serialization=False)
    assert "no zip archive" in message_of(path) and not ran.exists()


@pytest.mark.parametrize("content", [torch.ones(3), [1, 2], "text", None])
def test_what_holds_no_dict_is_refused(tmp_path, content):
    (tmp_path / "x.ckpt").write_bytes(saved(content))
    assert "where a checkpoint holds a dict" in message_of(tmp_path / "x.ckpt")


def test_many_and_strange_names_of_classes_stay_one_message(tmp_path):
    pickled = b"\x80\x02(" + b"".join(b"cm\x1b[2J%i\nKind\n" % i for i in range(30)) + b"t."
    path = tmp_path / "x.ckpt"
    path.write_bytes(archive({"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}))
    assert "and 22 more" in message_of(path)


def test_a_state_that_is_truncated_anywhere(good):
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


def test_a_manifest_that_is_truncated_anywhere(good):
    whole = (good / MANIFEST).read_bytes()
    for size in range(len(whole)):
        (good / MANIFEST).write_bytes(whole[:size])
        refused(good)


def test_one_flipped_bit_anywhere(good):
    chance = random.Random(5)
    files = [good / STATE, good / MANIFEST]
    for _ in range(200):
        file = chance.choice(files)
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        refused(good)
        file.write_bytes(whole)
    verify(good)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_bit_in_a_file_without_a_manifest_is_read_or_refused(good, tmp_path):
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
def test_a_file_that_is_no_manifest(good, name):
    (good / MANIFEST).write_bytes(MANIFESTS[name])
    assert MANIFEST in refused(good)


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
def test_a_sealed_manifest_that_says_what_it_must_not(good, name):
    seal(good, **CHANGES[name])
    assert MANIFEST in refused(good) or STATE in refused(good)


@pytest.mark.parametrize("lacking", ["epoch", "step", "rankzero", "contents", "needs", "files"])
def test_a_sealed_manifest_that_lacks_something(good, lacking):
    content = {key: value for key, value in read_manifest(good).items() if key not in (lacking, "sha256")}
    (good / MANIFEST).write_text(manifest_text(content))
    refused(good)


@pytest.mark.parametrize("name", ["../x", "../../../etc/passwd", "/etc/passwd", "a/b", ".", "..", "", "x\0y"])
def test_a_name_that_leads_elsewhere(good, name):
    seal(good, files={name: {"bytes": 1, "sha256": "0"}})
    assert "where state.pt alone belongs" in refused(good)


def test_a_manifest_that_was_written_another_way(good):
    content = json.loads((good / MANIFEST).read_text())
    for text in (json.dumps(content), json.dumps(content, indent=2, sort_keys=True) + "\n\n"):
        (good / MANIFEST).write_text(text)
        assert "is not what was written" in refused(good)


@pytest.mark.parametrize("name", [STATE, MANIFEST])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory", "nothing"])
def test_what_is_no_regular_file(good, tmp_path, name, kind):
    file = good / name
    moved = file.rename(tmp_path / "moved")
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "dangling link":
        file.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    assert name in refused(good)


def test_a_pipe_or_a_file_in_place_of_a_checkpoint(good, tmp_path):
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


def both(good: Path, state: bytes) -> str:
    """What is said of a state, as a file with a valid manifest and without one."""
    seal(good, state)
    (good.parent / "x.ckpt").write_bytes(state)
    message_of(good.parent / "x.ckpt")
    return message_of(good)


def test_the_archives_made_here_are_such_as_are_read(good):
    state = archive(entries_of((good / STATE).read_bytes()))
    seal(good, state)
    assert load(good)["state_dict"]["w"].tolist() == list(range(64))


@pytest.mark.system
def test_a_zip_bomb_of_zeros(good):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("archive/data/0", "w", force_zip64=True) as entry:
            for _ in range(1 << 6):
                entry.write(bytes(1 << 24))
        file.writestr("archive/data.pkl", saved({})[:100])
    assert len(buffer.getvalue()) < 2_000_000
    assert "compressed" in both(good, buffer.getvalue())


def test_a_zip_bomb_of_entries_that_overlap(good):
    """Each of a thousand entries claims the same bytes."""
    whole = bytearray(archive({"data/0": bytes(100_000)}))
    end = whole.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", whole, end + 16)[0]
    record = bytes(whole[start:end])
    records = b"".join(record.replace(b"data/0", f"dat{i:03}".encode()) for i in range(1000))
    finish = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1000, 1000, len(records), start, 0)
    assert "overlap" in both(good, bytes(whole[:start]) + records + finish)


@pytest.mark.parametrize("name", ["../../x", "/etc/x"])
def test_an_entry_that_leads_elsewhere(good, name):
    buffer = io.BytesIO((good / STATE).read_bytes())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(name, b"x")
    assert "outside of itself" in both(good, buffer.getvalue())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_is_there_twice(good):
    buffer = io.BytesIO((good / STATE).read_bytes())
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(file.namelist()[0], b"another")
    assert "twice" in both(good, buffer.getvalue())


def test_a_second_list_of_entries_behind_the_first(good):
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
def test_a_pickle_that_is_none(good, name):
    entries = entries_of((good / STATE).read_bytes())
    both(good, archive({**entries, "data.pkl": PICKLES[name]}))


TOY = ("--model", "MLP", "--data", "Toy")


@pytest.fixture
def run(here):
    fit_here(*TOY, "--epochs", "1", "--run", "x")
    return here / "runs/x/checkpoints/step-00000064"


def with_code(checkpoint: Path, ran: Path) -> None:
    content = torch.load(checkpoint / STATE, weights_only=True)
    seal(checkpoint, saved({**content, "extra": Namespace(touched=Touches(ran))}))


def test_a_run_and_an_evaluation_refuse_what_runs_code_and_say_how_to_read_it_anyway(run, here, capsys):
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


def test_a_run_carries_on_from_what_runs_code_if_it_is_told_to(run, here):
    with_code(run, here / "ran")
    assert fit_here(*TOY, "--epochs", "2", "--run", "x", "--trust_checkpoint", "yes") == 0
    assert "trust" not in (here / "runs/x/config.yaml").read_text()


@pytest.mark.system
def test_a_person_sees_a_message_and_no_traceback(run, here):
    bomb = archive({"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    (here / "bomb.ckpt").write_bytes(bomb)
    result = fit(*TOY, "--epochs", "2", "--resume", "bomb.ckpt", folder=here, code=2)
    assert result.err.startswith("rankzero: cannot start\n  asked  the checkpoint ")
    assert "Traceback" not in result.out + result.err
    assert [path.name for path in (here / "runs").iterdir()] == ["x"]


CONFIGS = [
    *(None, 5, "", "[1]", "a: [", "model: 3", "model: {class_path: 3}", "model: {class_path: os.mkdir}", "\t"),
    *("model: {class_path: lightning_modules.MLP, init_args: {no: 3}}", "model: [" * 2000, "data: {class_path: x}"),
    *("model: !!bool x", 'model: !!int ""', "? {}\n: 1", "model: {class_path: !!timestamp x}"),
    "a0: &a0 [x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    + "model: {class_path: *a29}\ndata: {class_path: *a29}",
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config)[:40])
def test_a_sealed_configuration_that_is_none(run, config):
    seal(run, rankzero={"run": "x", "config": config})
    with pytest.raises(CannotStart):
        evaluate_here("--checkpoint", str(run))
    if config:
        with pytest.raises(CannotStart):
            fit_here(*TOY, "--epochs", "2", "--run", "y", "--resume", str(run))
