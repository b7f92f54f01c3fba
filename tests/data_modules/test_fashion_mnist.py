import gzip
import shutil

import numpy as np
import pytest
import torch
from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

from data_modules.fashion_mnist import DEBIAN, FILES, MEAN, STD, FashionMNIST, read_idx
from running import require


def test_debians_files_are_split_and_normalized():
    require("fashion-mnist")
    module = FashionMNIST()
    module.root = module.root / "nowhere"
    module.prepare_data()
    module.setup("fit")
    sizes = {split: len(data) for split, data in module.splits.items()}
    assert sizes == {"train": 55_000, "val": 5_000, "test": 10_000}
    assert torch.cat([module.splits["train"].targets, module.splits["val"].targets]).bincount().tolist() == [6000] * 10
    inputs, _ = module.splits["val"].__getitems__(list(range(5000)))
    assert inputs.shape == (5000, 1, 28, 28) and abs(inputs.mean()) < 0.02 and abs(inputs.std() - 1) < 0.02


@pytest.mark.parametrize(
    "damage", [lambda data: bytes([*data[:5000], data[5000] ^ 255, *data[5001:]]), lambda data: data[:-100]]
)
def test_the_error_names_a_damaged_file(tmp_path, damage):
    require("fashion-mnist")
    shutil.copytree(DEBIAN, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="corrupt: t10k-images-idx3-ubyte.gz"):
        FashionMNIST(root=str(tmp_path)).prepare_data()


UNREADABLE = {
    "empty": b"",
    "no gzip": b"not gzip",
    "no header": gzip.compress(b"\0\0\x08"),
    "truncated": gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc"),
    "another type": gzip.compress(b"\0\0\x09\x01\0\0\0\x01a"),
    "too long": gzip.compress(b"\0\0\x08\x01\0\0\0\x01ab"),
    "a huge size": gzip.compress(b"\0\0\x08\x02\x7f\xff\xff\xff\x7f\xff\xff\xffa"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_content_is_refused_with_the_advice_to_delete_the_file(tmp_path, name):
    (tmp_path / "a.gz").write_bytes(UNREADABLE[name])
    with pytest.raises(ValueError, match=r"^corrupt: .*a\.gz.*delete it"):
        read_idx(tmp_path / "a.gz")


def idx(array):
    """Returns an array of bytes in LeCun's IDX format."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def test_idx_is_read_as_torchvision_reads_it(tmp_path):
    for shape in ((1,), (5,), (3, 4, 5)):
        content = idx(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
        (tmp_path / "a").write_bytes(content)
        (tmp_path / "a.gz").write_bytes(gzip.compress(content))
        found, expected = read_idx(tmp_path / "a.gz"), read_sn3_pascalvincent_tensor(str(tmp_path / "a"))
        assert torch.equal(found, expected) and found.dtype is expected.dtype is torch.uint8
    for empty in ((0,), (0, 28, 28)):
        (tmp_path / "a.gz").write_bytes(gzip.compress(idx(np.zeros(empty, np.uint8))))
        assert read_idx(tmp_path / "a.gz").shape == empty


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Files with the published counts; an image (1 x 3 pixels) encodes its number, the label its last digit."""
    root = tmp_path_factory.mktemp("numbered")
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for images, labels, count in ((FILES[0], FILES[1], 60_000), (FILES[2], FILES[3], 10_000)):
        numbers = np.arange(count)
        pixels = np.stack([numbers >> 16, numbers >> 8, numbers], 1).astype(np.uint8)[:, None]
        (folder / images.name).write_bytes(gzip.compress(idx(pixels), 1))
        (folder / labels.name).write_bytes(gzip.compress(idx((numbers % 10).astype(np.uint8)), 1))
    return root


def image_numbers(data):
    return (data.inputs.flatten(1).long() * torch.tensor([1 << 16, 1 << 8, 1])).sum(1)


def test_splits_use_every_image_once_with_its_label(numbered):
    splits, reloaded = (FashionMNIST(root=str(numbered)).load() for _ in range(2))
    found = {split: image_numbers(data) for split, data in splits.items()}
    assert {split: len(numbers) for split, numbers in found.items()} == {"train": 55_000, "val": 5_000, "test": 10_000}
    assert torch.equal(torch.cat([found["train"], found["val"]]).sort().values, torch.arange(60_000))
    assert torch.equal(found["test"], torch.arange(10_000))
    for split, data in splits.items():
        assert torch.equal(data.targets, found[split] % 10) and data.inputs.shape[1:] == (1, 1, 3)
        assert torch.equal(data.inputs, reloaded[split].inputs)


def test_only_training_images_are_mirrored_and_only_on_request(numbered):
    for augment in (True, False):
        for split, data in FashionMNIST(root=str(numbered), augment=augment).load().items():
            transformed = data.__getitems__(range(200))[0]
            normalized = (data.inputs[:200].float() - MEAN[0]) / STD[0]
            mirrored = (transformed != normalized).flatten(1).any(1)
            assert torch.equal(transformed[mirrored], normalized[mirrored].flip(-1))
            assert bool(mirrored.any()) is (augment and split == "train")


def test_the_root_takes_precedence_over_its_raw_folder_and_debians_folder(tmp_path, monkeypatch):
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    debian = tmp_path / "debian"
    monkeypatch.setattr("data_modules.fashion_mnist.DEBIAN", debian)
    monkeypatch.chdir(tmp_path)

    def create_files(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            (folder / file.name).touch()

    assert FashionMNIST().folder is None
    create_files(debian)
    assert FashionMNIST().folder == debian and FashionMNIST(root="data").folder is None
    create_files(raw)
    assert FashionMNIST().folder.resolve() == raw == FashionMNIST(root=str(tmp_path / "data")).folder
    create_files(tmp_path / "data")
    assert FashionMNIST().folder.resolve() == tmp_path / "data"
