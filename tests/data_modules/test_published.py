"""Data sets that somebody published: Fashion-MNIST and CIFAR-10."""

import gzip
import hashlib
import pickle
import shutil
import threading
import urllib.request

import numpy as np
import pytest
import torch

from data_modules import cifar10
from data_modules.cifar10 import CIFAR10, read_batch
from data_modules.fashion_mnist import DEBIAN, FILES, FashionMNIST, read_idx
from data_modules.published_files import PublishedFile, check, download
from running import require


def md5(data):
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def test_fashion_mnist_of_debian():
    require("fashion-mnist")
    module = FashionMNIST()
    module.root = module.root / "nowhere"
    module.prepare_data()
    module.setup("fit")
    sizes = {split: len(data) for split, data in module.splits.items()}
    assert sizes == {"train": 55_000, "val": 5_000, "test": 10_000}
    labels = torch.cat([module.splits["train"].targets, module.splits["val"].targets])
    assert labels.bincount().tolist() == [6000] * 10
    inputs, _ = module.splits["val"].__getitems__(list(range(5000)))
    assert inputs.shape == (5000, 1, 28, 28) and abs(inputs.mean()) < 0.02 and abs(inputs.std() - 1) < 0.02


@pytest.mark.parametrize("damage", ["bytes", "cut short"])
def test_a_damaged_file_of_fashion_mnist_is_named(tmp_path, damage):
    require("fashion-mnist")
    shutil.copytree(DEBIAN, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    if damage == "bytes":
        data[5000] ^= 255
    path.write_bytes(data if damage == "bytes" else data[:-100])
    with pytest.raises(ValueError, match="corrupt: t10k-images-idx3-ubyte.gz"):
        FashionMNIST(root=str(tmp_path)).prepare_data()


def test_without_a_network_the_error_says_what_to_do(tmp_path, no_network):
    with pytest.raises(FileNotFoundError) as error:
        FashionMNIST(root=str(tmp_path / "new" / "data")).prepare_data()
    text = str(error.value)
    assert all(file.name in text for file in FILES)
    assert str(tmp_path / "new" / "data") in text and "apt-get install dataset-fashion-mnist" in text
    assert not (tmp_path / "new").exists()
    with pytest.raises(FileNotFoundError, match=r"data_batch_1.*cifar-10-python\.tar\.gz"):
        CIFAR10(root=str(tmp_path / "new")).prepare_data()


def test_what_is_there_stays_when_a_download_fails(tmp_path, no_network):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileNotFoundError):
        CIFAR10(root=str(tmp_path)).prepare_data()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_download_happens_once_for_many(tmp_path):
    files = [PublishedFile("a", md5(b"a")), PublishedFile("b", md5(b"b"))]
    fetched = []

    def fetch(folder):
        fetched.append(folder)
        for name in ("a", "b"):
            (folder / name).write_text(name)

    threads = [threading.Thread(target=download, args=(files, tmp_path / "x", fetch, "")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert {path.name for path in (tmp_path / "x").iterdir()} - {".download.lock"} == {"a", "b"}


def test_a_download_that_is_not_what_was_published_leaves_nothing(tmp_path):
    files = [PublishedFile("a", md5(b"a"))]
    with pytest.raises(FileNotFoundError, match="by checksum"):
        download(files, tmp_path / "x", lambda folder: (folder / "a").write_text("other"), "")
    assert not (tmp_path / "x").exists()


def test_a_gz_that_was_packed_anew_is_known_by_its_content(tmp_path):
    file = PublishedFile("a.gz", md5(b"as published"), hashlib.sha256(b"content").hexdigest())
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"content"))
    check([file], tmp_path, "")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"other"))
    with pytest.raises(ValueError, match="corrupt"):
        check([file], tmp_path, "")


def test_idx(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x02" + b"\0\0\0\x02\0\0\0\x03" + bytes(range(6))))
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(gzip.compress(b"\0\0\x08\x01" + b"\0\0\0\x05" + b"abc"))
    with pytest.raises(ValueError, match="cut short"):
        read_idx(path)


def write_cifar(folder, each=20, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for file in cifar10.FILES:
        data = generator.integers(0, 256, (each, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, each).tolist()
        (folder / file.name).write_bytes(pickle.dumps({"data": data, "labels": labels, **changes}))


def test_cifar10_of_ones_own_making(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-py")
    with pytest.raises(ValueError, match=r"data_batch_1.*--data.verify false"):
        CIFAR10(root=str(tmp_path)).prepare_data()
    module = CIFAR10(root=str(tmp_path), verify=False, batch_size=8)
    module.prepare_data()
    module.setup("fit")
    assert {split: len(data) for split, data in module.splits.items()} == {"train": 90, "val": 10, "test": 20}
    pictures, labels = next(iter(module.train_dataloader()))
    assert pictures.shape == (8, 3, 32, 32) and labels.dtype is torch.int64


def test_cifar10_channels_come_first(tmp_path):
    data = np.arange(3072, dtype=np.uint16).astype(np.uint8)[None]
    (tmp_path / "b").write_bytes(pickle.dumps({b"data": data, b"labels": [3]}))
    pictures, labels = read_batch(tmp_path / "b")
    assert pictures[0, 1, 0, 0] == 1024 % 256 and pictures[0, 0, 1, 0] == 32 and labels.tolist() == [3]


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", pickle.dumps({"data": [[1, 2]]}), pickle.dumps({"data": np.zeros((1, 3072), "u1"), "labels": [11]})],
)
def test_a_damaged_batch_is_named(tmp_path, content):
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match="corrupt: .*data_batch_1"):
        read_batch(tmp_path / "data_batch_1")


def test_a_batch_that_would_run_code_is_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    (tmp_path / "b").write_bytes(pickle.dumps({"data": Evil()}))
    with pytest.raises(ValueError, match=r"builtins\.print, which is no array"):
        read_batch(tmp_path / "b")
    assert "ran" not in capsys.readouterr().out
