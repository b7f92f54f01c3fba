import pickle
import sys

import numpy as np
import pytest
import torch
import torchvision

from data_modules import cifar10
from data_modules.cifar10 import CIFAR10, read_batch
from data_modules.in_memory import split_indices


def write_cifar(folder, count=20):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for file in cifar10.FILES:
        data = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, count).tolist()
        (folder / file.name).write_bytes(pickle.dumps({"data": data, "labels": labels}))


def test_converted_files_need_verify_false(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-py")
    with pytest.raises(ValueError, match=r"data_batch_1.*--data.verify false"):
        CIFAR10(root=str(tmp_path)).prepare_data()
    module = CIFAR10(root=str(tmp_path), verify=False, batch_size=8)
    module.prepare_data()
    module.setup("fit")
    assert {split: len(data) for split, data in module.splits.items()} == {"train": 90, "val": 10, "test": 20}
    images, labels = next(iter(module.train_dataloader()))
    assert images.shape == (8, 3, 32, 32) and labels.dtype is torch.int64


def batch(folder, count, labels):
    """Writes a batch of images without values, and returns its path."""
    (folder / "b").write_bytes(pickle.dumps({"data": np.zeros((count, 3072), np.uint8), "labels": labels}))
    return folder / "b"


JUNK = [
    b"",
    b"junk",
    pickle.dumps({"data": [[1, 2]]}),
    pickle.dumps({"data": np.zeros((1, 3072), "u1"), "labels": [11]}),
]


@pytest.mark.parametrize("content", JUNK, ids=["empty", "no pickle", "no images", "wrong label"])
def test_the_error_names_a_damaged_batch(tmp_path, content):
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match="corrupt: .*data_batch_1"):
        read_batch(tmp_path / "data_batch_1")


def test_the_splits_contain_the_images_that_torchvision_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_load_meta", lambda self: None)
    write_cifar(tmp_path / "cifar-10-batches-py")
    splits = CIFAR10(root=str(tmp_path), split_seed=4).load()
    train, val = split_indices([90, 10], 4)
    for split, indices in (("train", train), ("val", val), ("test", slice(None))):
        stock = torchvision.datasets.CIFAR10(tmp_path, train=split != "test")
        assert torch.equal(splits[split].inputs, torch.from_numpy(stock.data).permute(0, 3, 1, 2)[indices])
        assert torch.equal(splits[split].targets, torch.tensor(stock.targets)[indices])


@pytest.mark.parametrize("augment", [True, False])
def test_only_training_images_are_augmented_and_only_on_request(tmp_path, augment):
    write_cifar(tmp_path)
    for split, data in CIFAR10(root=str(tmp_path), augment=augment).load().items():
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (cifar10.MEAN, cifar10.STD))
        is_augmented = not torch.equal(data.__getitems__(range(10))[0], (data.inputs[:10].float() - mean) / std)
        assert is_augmented is (augment and split == "train")


def test_the_archives_folder_takes_precedence_over_the_root(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    assert CIFAR10(root=str(tmp_path)).folder is None
    write_cifar(tmp_path, count=1)
    assert CIFAR10(root=str(tmp_path)).folder == tmp_path
    write_cifar(folder, count=1)
    assert CIFAR10(root=str(tmp_path)).folder == folder == CIFAR10(root=str(folder)).folder
    (folder / "test_batch").unlink()
    assert CIFAR10(root=str(tmp_path)).folder == tmp_path


def test_pickles_of_older_versions_of_numpy_are_read(tmp_path):
    """Channels are the first dimension of an image."""
    data = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    content = pickle.dumps({b"data": data, b"labels": [3, np.int64(4)]}, protocol=2)
    older = content.replace(b"numpy._core", b"numpy.core")  # numpy 1 writes this itself
    assert b"numpy.core" in older
    (tmp_path / "b").write_bytes(older)
    images, labels = read_batch(tmp_path / "b")
    assert torch.equal(images, torch.from_numpy(data.reshape(2, 3, 32, 32))) and labels.tolist() == [3, 4]


def test_labels_that_do_not_fit_the_images_are_refused_and_a_batch_without_images_is_read(tmp_path):
    for labels in ([], [1], [1, 2, 3], [-1, 0], [0, 10]):
        with pytest.raises(ValueError, match="^corrupt: .*b has 2 images, but its labels do not match them$"):
            read_batch(batch(tmp_path, 2, labels))
    found, labels = read_batch(batch(tmp_path, 0, []))
    assert found.shape == (0, 3, 32, 32) and labels.shape == (0,)


@pytest.mark.parametrize(
    "name",
    ["posix\nsystem", "builtins\neval", "numpy\nload", "numpy.core.multiarray\nfromfile", "loaded_by_pickle\nname"],
)
def test_a_pickle_that_names_anything_but_arrays_is_refused_and_imports_no_module(tmp_path, monkeypatch, name):
    (tmp_path / "loaded_by_pickle.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "b").write_bytes(f"c{name}\n(S'touch {tmp_path}/ran'\ntR.".encode())
    with pytest.raises(ValueError, match=rf"\.{name.split()[1]}, which is not an array"):
        read_batch(tmp_path / "b")
    assert not (tmp_path / "ran").exists() and "loaded_by_pickle" not in sys.modules
