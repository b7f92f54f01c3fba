import multiprocessing
import os
from pathlib import Path

import pytest

from rankzero.distributed.connections import key
from rankzero.distributed.connections.key import KEY_FD, KEY_VARIABLE, Key, config_folder, find_key, pass_key
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
        assert len({result.secret for result in pool.starmap(found, [()] * 64, chunksize=1)}) == 1


def test_the_variable_takes_precedence_over_the_file_and_the_key_of_the_parent_over_both(home, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "v" * 32)
    of_variable = Key(b"v" * 32, KEY_VARIABLE, is_explicit=True)
    assert found() == of_variable and not home.exists()
    monkeypatch.setenv(KEY_FD, pass_key(b"")[1][KEY_FD])  # the parent may pass no key
    assert found() == of_variable
    descriptor, variables = pass_key(b"p" * 32)
    monkeypatch.setenv(KEY_FD, variables[KEY_FD])
    assert found() == Key(b"p" * 32, "the process that started this one", is_explicit=True)
    assert KEY_FD not in os.environ and not home.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with pytest.raises(RequestError, match="RANKZERO_KEY has 6 characters, and at least 32 are required") as caught:
        found()
    assert "openssl rand -hex 32" in caught.value.instead and "secret" not in str(caught.value)


def test_a_file_that_is_open_to_others_or_damaged_or_of_another_user_is_not_used(home, monkeypatch):
    found()
    for mode in (0o640, 0o604, 0o660, 0o777):
        (home / "key").chmod(mode)
        reason = f"{home / 'key'} is open to other users; to close it: chmod go-"
        assert found().secret is None and reason in found().origin
    (home / "key").chmod(0o600)
    for content in ("", "\n", "short\n"):
        (home / "key").write_text(content)
        assert found().secret is None and "is damaged; delete it" in found().origin
    (home / "key").unlink()
    assert found().secret
    monkeypatch.setattr(key.os, "geteuid", lambda: os.getuid() + 1)
    assert found().secret is None and "belongs to another user" in found().origin


def test_there_is_no_key_without_a_usable_folder(home, tmp_path, monkeypatch):
    home.write_text("a file in place of the folder")
    assert found().secret is None and str(home / "key") in found().origin
    home.unlink()
    (tmp_path / "elsewhere").mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    assert found().secret is None and "must not be symbolic links" in found().origin
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME")
    assert found() == Key(None, "the user has no home directory (HOME is not set)")


def test_neither_a_fingerprint_nor_a_representation_contains_the_key():
    first = Key(b"k" * 32, "")
    assert first.fingerprint("7") == Key(b"k" * 32, "elsewhere").fingerprint("7")
    assert first.fingerprint("7") != first.fingerprint("8") != Key(b"o" * 32, "").fingerprint("8")
    assert "k" * 32 not in first.fingerprint("7") and Key(None, "").fingerprint("7") == ""
    assert "kkk" not in repr(Key(b"k" * 32, "file"))


IN_HOME = "/home/a/.config/rankzero"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/settings", "HOME": "/home/a"}, "/settings/rankzero"),
        ({"XDG_CONFIG_HOME": "/settings/"}, "/settings/rankzero"),
        ({"HOME": "/home/a"}, IN_HOME),
        *(({"XDG_CONFIG_HOME": path, "HOME": "/home/a"}, IN_HOME) for path in ("", "relative", "~/settings")),
        ({"HOME": "/"}, "/.config/rankzero"),
        *((variables, None) for variables in ({}, {"HOME": "relative"}, {"HOME": ""}, {"XDG_CONFIG_HOME": "relative"})),
    ],
)
def test_the_first_absolute_path_is_used(variables, folder, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config_folder() == (Path(folder) if folder else None)
    assert not Path("/settings").exists()
