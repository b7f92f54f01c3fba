"""A checkpoint that needs code is read without `--trust_checkpoint` only if a run of the same user wrote it."""

import json
import shutil
from argparse import Namespace

import pytest
import torch
from checkpoint_files import CreatesFolder, serialized

from rankzero.checkpoints import safe_load
from rankzero.checkpoints.manifest import SIGNATURE, STATE, read_manifest, verify
from rankzero.checkpoints.safe_load import _open, load, signed_sha256_of
from rankzero.checkpoints.write import write_directory
from rankzero.messages import RequestError
from running import TOY, evaluate_in_process, fit, fit_in_process, refusal_of


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """The configuration folder of a user who has no key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config/rankzero"


@pytest.fixture
def saved(settings, tmp_path):
    """A checkpoint with code, written by this user."""
    content = {"state_dict": {}, "epoch": 1, "global_step": 2, "callbacks": {"own": CreatesFolder(tmp_path / "ran")}}
    write_directory(content, tmp_path / "step-00000002")
    return tmp_path / "step-00000002"


def refused(checkpoint, **options):
    with pytest.raises(RequestError, match="--trust_checkpoint yes") as error:
        load(checkpoint, **options)
    assert not (checkpoint.parent / "ran").exists()
    return str(error.value)


def test_a_checkpoint_of_the_same_user_is_read_without_trust_checkpoint_even_if_moved(saved, tmp_path):
    assert read_manifest(saved)["needs"] == ["os.makedirs"]
    load(shutil.move(saved, tmp_path / "elsewhere"))
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize(
    "change",
    [{"without": [SIGNATURE]}, *({SIGNATURE: value} for value in ("", "0" * 64, "\u00e9" * 64, 7))],
    ids=["none", "empty", "of other bytes", "not ASCII", "no text"],
)
def test_a_missing_or_wrong_signature_is_refused(saved, change, write_manifest):
    write_manifest(saved, **change)
    assert "os.makedirs" in refused(saved)


def test_another_state_with_the_original_signature_is_refused(saved, tmp_path, write_manifest):
    other_state = serialized({"state_dict": {}, "callbacks": CreatesFolder(tmp_path / "ran"), "more": 1})
    (saved / STATE).write_bytes(other_state)
    assert "differs from the file that was written" in refusal_of(load, saved).found
    write_manifest(saved, other_state)
    verify(saved)
    refused(saved)


def test_a_checkpoint_of_another_user_is_refused(saved, settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    refused(saved)
    safe_load.sign({"bytes": 1, "sha256": "0"})  # creates a key of the other user
    refused(saved)


def test_an_unsafe_key_is_not_used_and_the_reason_is_reported(saved, settings):
    """tests/rankzero/distributed/connections/test_key.py lists what makes a key unsafe."""
    (settings / safe_load.KEY_FILE).chmod(0o640)
    assert safe_load.key_problem() is not None
    assert "checkpoint.key is open to other users; to close it: chmod go-r" in refusal_of(load, saved).found
    assert not (saved.parent / "ran").exists()
    write_directory({"own": CreatesFolder(saved.parent / "ran")}, saved.with_name("step-00000003"))
    assert SIGNATURE not in read_manifest(saved.with_name("step-00000003"))


@pytest.mark.parametrize("home", [None, "", "relative", "/proc/nothing"])
def test_without_a_home_directory_checkpoints_are_written_unsigned(home, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    write_directory({"own": CreatesFolder(tmp_path / "ran")}, tmp_path / "step-00000003")
    assert SIGNATURE not in read_manifest(tmp_path / "step-00000003")
    refused(tmp_path / "step-00000003")


def test_a_rank_without_the_key_trusts_rank_zeros_digest_and_verifies_its_own_file(saved, monkeypatch, tmp_path):
    sha256 = signed_sha256_of(saved)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another host"))
    assert sha256 and signed_sha256_of(saved) == ""
    refused(saved, trusted_sha256="0" * 64)
    content = (saved / STATE).read_bytes()
    (saved / STATE).write_bytes(content[:-1] + b"x")
    with pytest.raises(RequestError, match="differs from the file that was written"):
        load(saved, trusted_sha256=sha256)
    assert not (tmp_path / "ran").exists()
    (saved / STATE).write_bytes(content)
    load(saved, trusted_sha256=sha256)
    assert (tmp_path / "ran").exists()


def test_the_verified_content_is_unpickled_even_if_the_file_is_overwritten_after_it_was_opened(saved):
    opened, may_run_code = _open(saved, False, "", None, None)
    assert may_run_code
    with opened as file:
        expected = (saved / STATE).read_bytes()
        (saved / STATE).write_bytes(b"x" * len(expected))
        assert file.read() == expected


CALLBACK = """
import os
from lightning.pytorch import Callback

class Keeps(Callback):
    def state_dict(self):
        return {"range": range(3)}

    def load_state_dict(self, state):
        open(f"restored-{os.getpid()}", "w").write(str(state["range"]))
"""
KEEPS_RUN = ("--model", "MLP", "--data", "Toy", "--trainer.callbacks", "keeps.Keeps", "--run", "x")


@pytest.mark.system
def test_the_same_command_resumes_on_any_number_of_ranks(cwd, settings):
    (cwd / "keeps.py").write_text(CALLBACK)
    first = fit(*KEEPS_RUN, "--epochs", "1", folder=cwd)
    assert "Your own runs resume from them; other users need --trust_checkpoint yes" in first.out + first.err
    fit(*KEEPS_RUN, "--epochs", "2", "--devices", "2", folder=cwd)
    assert [path.read_text() for path in cwd.glob("restored-*")] == ["range(0, 3)"] * 2
    assert json.loads((cwd / "runs/x/summary.json").read_text())["attempts"] == 2


def test_only_a_users_own_or_a_trusted_checkpoint_may_run_code_in_commands(finished, settings, cwd, write_manifest):
    newest = finished() / "checkpoints/step-00000064"
    content = torch.load(newest / STATE, weights_only=True)
    shutil.rmtree(newest)
    write_directory({**content, "own": Namespace(touched=CreatesFolder(cwd / "ran"))}, newest)
    assert evaluate_in_process("--run", "x") == 0 and (cwd / "ran").exists()
    (cwd / "ran").rmdir()
    write_manifest(newest, **{SIGNATURE: "0" * 64})
    for work in (
        lambda: fit_in_process(*TOY, "--epochs", "2", "--run", "y", "--resume", str(newest)),
        lambda: fit_in_process(*TOY, "--epochs", "2", "--run", "x"),
        lambda: evaluate_in_process("--checkpoint", str(newest)),
        lambda: evaluate_in_process("--run", "x"),
        lambda: evaluate_in_process("--run", "x", "--export", "x.pt"),
    ):
        assert "--trust_checkpoint yes" in str(refusal_of(work)).partition("os.makedirs")[2]
    assert not any((cwd / name).exists() for name in ("ran", "runs/y", "x.pt"))
    assert evaluate_in_process("--checkpoint", str(newest), "--trust_checkpoint", "yes") == 0
    assert (cwd / "ran").exists()
    assert fit_in_process(*TOY, "--epochs", "2", "--run", "x", "--trust_checkpoint", "yes") == 0
    assert "trust" not in (cwd / "runs/x/config.yaml").read_text()
