"""Fashion-MNIST (Xiao et al. 2017): 70,000 grayscale images of clothes, 28x28 pixels, in 10 classes."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_modules.augmentation import ImageTransform
from data_modules.in_memory import InMemory, InMemoryData, split_indices
from data_modules.published_files import PublishedFile, download, find_folder, verify_checksums

FILES = (
    PublishedFile(
        "train-images-idx3-ubyte.gz",
        md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        content_sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    PublishedFile(
        "train-labels-idx1-ubyte.gz",
        md5="25c81989df183df01b3e8a0aad5dffbe",
        content_sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    PublishedFile(
        "t10k-images-idx3-ubyte.gz",
        md5="bef4ecab320f06d8554ea6380940ec79",
        content_sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    PublishedFile(
        "t10k-labels-idx1-ubyte.gz",
        md5="bb300cfdad3c16e7a12a480ee83cd310",
        content_sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Folder in which Debian's package dataset-fashion-mnist installs the files."""

MEAN, STD = (72.94,), (90.02,)
"""Mean and standard deviation of the training images, in gray levels from 0 to 255."""

CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


class FashionMNIST(InMemoryData):
    """Fashion-MNIST: 55,000 images for training, 5,000 for validation, 10,000 for testing.

    Args:
        root: Folder with the four .gz files, or with torchvision's `FashionMNIST/raw` in it; missing files are
            downloaded into it. If omitted: `data`, or the folder of Debian's package dataset-fashion-mnist.
        augment: Whether training images are randomly mirrored.
        split_seed: Seed of the split into training and validation data.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        kwargs: See `InMemoryData`.
    """

    in_channels = 1
    image_size = 28
    in_features = 784
    num_classes = 10
    class_names = CLASSES

    def __init__(
        self, root: str | None = None, augment: bool = True, split_seed: int = 0, batch_size: int = 64, **kwargs: Any
    ) -> None:
        super().__init__(batch_size, **kwargs)
        self.root = Path(root or "data").expanduser()
        self.debian = [] if root else [DEBIAN]
        self.augment, self.split_seed = augment, split_seed

    @property
    def folder(self) -> Path | None:
        """The folder that contains all files, or None."""
        return find_folder(FILES, [self.root, self.root / "FashionMNIST" / "raw", *self.debian])

    def prepare_data(self) -> None:
        if self.folder is None:
            destination = self.root / "FashionMNIST" / "raw"
            download(FILES, destination, _fetch, ", or type as root: apt-get install dataset-fashion-mnist")
        assert self.folder
        verify_checksums(FILES, self.folder, advice="")

    def load(self) -> dict[str, InMemory]:
        """Reads the files and returns the splits."""
        folder = self.folder
        if folder is None:
            raise FileNotFoundError(f"missing: {', '.join(file.name for file in FILES)} in {self.root.resolve()}")
        images, labels, test_images, test_labels = (read_idx(folder / file.name) for file in FILES)
        train, val = split_indices([55_000, 5_000], self.split_seed)
        evaluation_transform = ImageTransform(MEAN, STD)
        return {
            "train": InMemory(images[train, None], labels[train].long(), ImageTransform(MEAN, STD, flip=self.augment)),
            "val": InMemory(images[val, None], labels[val].long(), evaluation_transform),
            "test": InMemory(test_images[:, None], test_labels.long(), evaluation_transform),
        }


def _fetch(folder: Path) -> None:
    from torchvision.datasets import FashionMNIST as Torchvision
    from torchvision.datasets.utils import download_url

    for file in FILES:
        download_url(Torchvision.mirrors[0] + file.name, folder, file.name)


def read_idx(path: Path) -> Tensor:
    """Reads a gzipped IDX file of unsigned bytes.

    LeCun's format consists of 0, 0, 8, the number of dimensions, the size of each dimension, and the bytes.

    Returns:
        A uint8 tensor of the shape that the file specifies.

    Raises:
        ValueError: The file is not an IDX file of bytes, or is truncated; the message names it.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        dimensions = data[3]
        shape = np.frombuffer(data, dtype=">i4", count=dimensions, offset=4).astype(int)
    except (OSError, EOFError, zlib.error, IndexError, ValueError):
        data, dimensions, shape = b"", 0, np.zeros(0, int)
    if data[:3] != b"\0\0\x08" or (shape < 0).any() or len(data) != 4 + 4 * dimensions + int(shape.prod()):
        raise ValueError(
            f"corrupt: {path} is not an IDX file of bytes, or is truncated; delete it to download it again"
        )
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())
