import multiprocessing
import os
from pathlib import Path

import pytest

from rankzero.distributed.connections import key_file
from rankzero.distributed.connections.key import KEY_FD, KEY_VARIABLE, Key, find_key, pass_key
from rankzero.messages import RequestError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The configuration folder of a user who has no key."""
    for name in (KEY_FD, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    find_key.cache_clear()
    yield tmp_path / "rankzero"
    find_key.cache_clear()


def found():
    find_key.cache_clear()
    return find_key()


def test_the_first_use_creates_a_key_that_only_the_user_can_read(home):
    created = found()
    assert created.secret == (home / "key").read_bytes() and len(created.secret) == 32
    assert created.origin == str(home / "key") and not created.is_explicit
    assert (home / "key").stat().st_mode & 0o777 == 0o600 and home.stat().st_mode & 0o777 == 0o700
    assert found() == created and [file.name for file in home.iterdir()] == ["key"]


def test_processes_that_start_at_once_use_the_same_new_key(home):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert len({result.secret for result in pool.map(_found, range(64), chunksize=1)}) == 1


def _found(_):
    return found()


def test_the_variable_takes_precedence_over_the_file(home, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "v" * 32)
    assert found() == Key(b"v" * 32, KEY_VARIABLE, is_explicit=True) and not home.exists()


def test_a_short_key_in_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with pytest.raises(RequestError, match="RANKZERO_KEY has 6 characters, and at least 32 are required") as caught:
        found()
    assert "openssl rand -hex 32" in caught.value.instead and "secret" not in str(caught.value)


def test_a_local_process_reads_the_key_that_its_parent_passes(home, monkeypatch):
    descriptor, variables = pass_key(b"p" * 32)
    monkeypatch.setenv(KEY_FD, variables[KEY_FD])
    monkeypatch.setenv(KEY_VARIABLE, "v" * 32)
    assert found() == Key(b"p" * 32, "the process that started this one", is_explicit=True)
    assert KEY_FD not in os.environ and not home.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_parent_may_pass_no_key(monkeypatch):
    _, variables = pass_key(b"")
    monkeypatch.setenv(KEY_FD, variables[KEY_FD])
    monkeypatch.setenv(KEY_VARIABLE, "v" * 32)
    assert found().origin == KEY_VARIABLE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_file_that_others_can_read_is_not_used(home, mode):
    found()
    (home / "key").chmod(mode)
    assert found().secret is None and f"{home / 'key'} is open to other users; to close it: chmod go-" in found().origin


@pytest.mark.parametrize("content", ["", "\n", "short\n"])
def test_a_file_without_a_key_is_not_used(home, content):
    found()
    (home / "key").write_text(content)
    assert found().secret is None and "is damaged; delete it" in found().origin


def test_a_file_of_another_user_is_not_used(home, monkeypatch):
    found()
    monkeypatch.setattr(key_file.os, "geteuid", lambda: os.getuid() + 1)
    assert found().secret is None and "belongs to another user" in found().origin


def test_there_is_no_key_without_a_home_directory(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME")
    assert found() == Key(None, "the user has no home directory (HOME is not set)")


def test_there_is_no_key_if_the_folder_cannot_be_created(home):
    home.write_text("a file in place of the folder")
    assert found().secret is None and str(home / "key") in found().origin


def test_there_is_no_key_if_a_parent_folder_cannot_be_searched(home, monkeypatch):
    """As in a container whose user is not the one that HOME belongs to. Root may search any folder, hence the mock."""

    def deny(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "is_symlink"):
        monkeypatch.setattr(Path, name, deny)
    assert found() == Key(None, f"the key {home / 'key'} cannot be used: Permission denied")


def test_a_symbolic_link_to_a_folder_is_not_followed(home, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    assert found().secret is None and f"{home} is a symbolic link" in found().origin


def test_a_fingerprint_depends_on_key_and_world_and_does_not_contain_the_key():
    first = Key(b"k" * 32, "")
    assert first.fingerprint("7") == Key(b"k" * 32, "elsewhere").fingerprint("7")
    assert first.fingerprint("7") != first.fingerprint("8") != Key(b"o" * 32, "").fingerprint("8")
    assert "k" * 32 not in first.fingerprint("7") and Key(None, "").fingerprint("7") == ""


def test_the_representation_of_a_key_does_not_contain_it():
    assert "kkk" not in repr(Key(b"k" * 32, "file"))
