"""Tests how files of published data sets are found, verified and downloaded."""

import contextlib
import gzip
import hashlib
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_modules import CIFAR10, FashionMNIST
from data_modules.published_files import TIMEOUT_SECONDS, PublishedFile, download, find_folder, verify_checksums


def md5(data):
    return hashlib.md5(data).hexdigest()


A, B = PublishedFile("a", md5(b"a")), PublishedFile("b", md5(b"b"))


def write_files(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


def failing_fetch(folder):
    (folder / "a").write_text("a")
    raise OSError("no network")


def test_concurrent_requests_download_once(tmp_path):
    fetched = []

    def fetch(folder):
        fetched.append(write_files(folder, a="a", b="b"))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: download([A, B], tmp_path / "x", fetch, ""), range(6)))
    assert len(fetched) == 1
    assert {path.name for path in (tmp_path / "x").iterdir()} - {".download.lock"} == {"a", "b"}


def test_a_recompressed_gz_is_verified_by_its_content(tmp_path):
    file = PublishedFile("a.gz", md5(b"as published"), hashlib.sha256(b"content").hexdigest())
    packed = gzip.compress(b"content", mtime=0)
    for data in (gzip.compress(b"other"), packed[:-4], packed[:10], b"", b"x"):
        (tmp_path / "a.gz").write_bytes(data)
        with pytest.raises(ValueError, match="corrupt"):
            verify_checksums([file], tmp_path, "")
    (tmp_path / "a.gz").write_bytes(packed)
    verify_checksums([file], tmp_path, "")
    assert PublishedFile("a.gz", md5(packed)).matches_checksum(tmp_path)  # without a checksum of the content
    assert not PublishedFile("a.gz", md5(b"content")).matches_checksum(tmp_path)


def test_the_first_folder_with_all_files_is_found(tmp_path):
    incomplete = write_files(tmp_path / "1", a="a")
    complete, also_complete = (write_files(tmp_path / name, a="", b="") for name in ("2", "3"))
    assert find_folder([A, B], [incomplete, tmp_path / "none", complete, also_complete]) == complete
    assert find_folder([A, B], [incomplete]) is None and find_folder([A, B], []) is None
    (incomplete / "b").mkdir()
    assert find_folder([A, B], [incomplete]) is None


def test_the_error_names_each_damaged_or_missing_file_and_what_to_do(tmp_path):
    verify_checksums([A, B], write_files(tmp_path, a="a", b="b"), "")
    with pytest.raises(ValueError) as error:
        verify_checksums([A, B], write_files(tmp_path, b="x"), ", or else")
    assert str(error.value) == (
        f"corrupt: b in {tmp_path} (the checksum differs from the published one); "
        "delete it and type the same command to download again, or else"
    )
    with pytest.raises(ValueError, match="^corrupt: a, b in .*; delete them and type the same"):
        verify_checksums([A, B], write_files(tmp_path, a=""), "")
    with pytest.raises(FileNotFoundError) as error:
        download([A, B], write_files(tmp_path / "x", b="old"), failing_fetch, "; from the shelf")
    assert str(error.value) == (
        f"missing: a; downloading failed (no network). Put the files into {tmp_path / 'x'}; from the shelf"
    )
    assert (tmp_path / "x" / "b").read_text() == "old" and not (tmp_path / "x" / "a").exists()


INCOMPLETE = r"^missing: a, b; downloading failed \("


@pytest.mark.parametrize(
    ("fetch", "error"),
    [
        (failing_fetch, INCOMPLETE),
        (lambda folder: None, INCOMPLETE),
        (lambda folder: write_files(folder, a="a"), INCOMPLETE),
        (lambda folder: write_files(folder, a="other", b="b"), "checksum differs"),
    ],
)
def test_an_incomplete_or_damaged_download_leaves_no_file(tmp_path, fetch, error):
    with pytest.raises(FileNotFoundError, match=error):
        download([A, B], tmp_path / "x" / "y", fetch, "")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileNotFoundError, match="missing: a; downloading failed"):
        download([A], tmp_path / "file" / "x", failing_fetch, "")
    assert (tmp_path / "file").read_text() == "kept"


DATA_SETS = {
    CIFAR10: r"data_batch_1, .*test_batch.*cifar-10-python\.tar\.gz",
    FashionMNIST: r"train-images-idx3-ubyte\.gz, .*t10k-labels-idx1-ubyte\.gz.*apt-get install dataset-fashion-mnist",
}


@pytest.mark.parametrize("data", DATA_SETS)
def test_without_a_network_the_error_names_the_missing_files_and_how_to_get_them(tmp_path, monkeypatch, data):
    def refuse(*arguments, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    folder = tmp_path / "new" / "data"
    with pytest.raises(FileNotFoundError, match=DATA_SETS[data]) as error:
        data(root=str(folder)).prepare_data()
    assert str(folder) in str(error.value) and not (tmp_path / "new").exists()
    with pytest.raises(FileNotFoundError, match=r"^missing: (data_batch_1|train-images-idx3-ubyte\.gz), .* in "):
        data(root=str(tmp_path)).load()


def test_an_interrupted_download_can_be_repeated_on_the_file_system_of_its_folder_and_a_complete_one_is_not(tmp_path):
    """Within one file system, a single rename moves each file to its folder."""

    def interrupted_fetch(folder):
        write_files(folder, a="a")
        raise KeyboardInterrupt

    def fetch(folder):
        assert folder.parent == tmp_path / "x"
        write_files(folder, a="a")

    with pytest.raises(KeyboardInterrupt):
        download([A], tmp_path / "x", interrupted_fetch, "")
    assert {path.name for path in (tmp_path / "x").iterdir()} <= {".download.lock"}
    for fetch_files in (fetch, lambda folder: pytest.fail("downloaded")):
        download([A], tmp_path / "x", fetch_files, "")
        assert (tmp_path / "x" / "a").read_text() == "a"


@pytest.mark.parametrize("fails", [False, True])
def test_a_download_sets_a_socket_timeout_and_restores_the_previous_one(tmp_path, fails):
    timeouts = []

    def fetch(folder):
        timeouts.append(socket.getdefaulttimeout())
        failing_fetch(folder) if fails else write_files(folder, a="a")

    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(12.5)
    try:
        with pytest.raises(FileNotFoundError) if fails else contextlib.nullcontext():
            download([A], tmp_path / "x", fetch, "")
        assert timeouts == [TIMEOUT_SECONDS] and socket.getdefaulttimeout() == 12.5
    finally:
        socket.setdefaulttimeout(previous)
