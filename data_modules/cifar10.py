"""CIFAR-10 (Krizhevsky 2009): 60,000 color images of 32x32 pixels in 10 classes."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_modules.augmentation import ImageTransform
from data_modules.in_memory import InMemory, InMemoryData, split_indices
from data_modules.published_files import PublishedFile, download, find_folder, verify_checksums

TRAIN_FILES = (
    PublishedFile("data_batch_1", md5="c99cafc152244af753f735de768cd75f"),
    PublishedFile("data_batch_2", md5="d4bba439e000b95fd0a9bffe97cbabec"),
    PublishedFile("data_batch_3", md5="54ebc095f3ab1f0389bbae665268c751"),
    PublishedFile("data_batch_4", md5="634d18415352ddfa80567beed471001a"),
    PublishedFile("data_batch_5", md5="482c414d41f54cd18b22e5b47cb7c3cb"),
)
TEST_FILE = PublishedFile("test_batch", md5="40351d587109b95175f43aff81a1287e")
FILES = (*TRAIN_FILES, TEST_FILE)

MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
"""Mean and standard deviation of red, green and blue in the training images, in levels from 0 to 255."""

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class CIFAR10(InMemoryData):
    """CIFAR-10: 45,000 images for training, 5,000 for validation, 10,000 for testing.

    Args:
        root: Folder with `cifar-10-batches-py`, or that folder itself; missing files are downloaded into it.
        verify: Whether the files must match the published checksums. False also accepts other files of the same format,
            such as your own conversion; the pickles may contain numpy arrays and plain types only.
        augment: Whether training images are randomly shifted by up to 4 pixels and randomly mirrored.
        split_seed: Seed of the split into training and validation data.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        kwargs: See `InMemoryData`.
    """

    in_channels = 3
    image_size = 32
    in_features = 3072
    num_classes = 10
    class_names = CLASSES

    def __init__(
        self,
        root: str = "data",
        verify: bool = True,
        augment: bool = True,
        split_seed: int = 0,
        batch_size: int = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, **kwargs)
        self.root = Path(root).expanduser()
        self.verify, self.augment, self.split_seed = verify, augment, split_seed

    @property
    def folder(self) -> Path | None:
        """The folder that contains all files, or None."""
        return find_folder(FILES, [self.root / "cifar-10-batches-py", self.root])

    def prepare_data(self) -> None:
        if self.folder is None:
            destination = self.root / "cifar-10-batches-py"
            download(
                FILES,
                destination,
                _fetch,
                "; they are in cifar-10-python.tar.gz, from https://www.cs.toronto.edu/~kriz/",
            )
        assert self.folder
        if self.verify:
            verify_checksums(FILES, self.folder, advice=", or type --data.verify false to use the present files")

    def load(self) -> dict[str, InMemory]:
        """Reads the files and returns the splits."""
        folder = self.folder
        if folder is None:
            raise FileNotFoundError(f"missing: {', '.join(file.name for file in FILES)} in {self.root.resolve()}")
        batches = [read_batch(folder / file.name) for file in TRAIN_FILES]
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        held_out = len(images) // 10
        train, val = split_indices([len(images) - held_out, held_out], self.split_seed)
        evaluation_transform = ImageTransform(MEAN, STD)
        training_transform = ImageTransform(MEAN, STD, padding=4, flip=True) if self.augment else evaluation_transform
        return {
            "train": InMemory(images[train], labels[train], training_transform),
            "val": InMemory(images[val], labels[val], evaluation_transform),
            "test": InMemory(*read_batch(folder / TEST_FILE.name), evaluation_transform),
        }


def _fetch(folder: Path) -> None:
    from torchvision.datasets import CIFAR10 as Torchvision
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(Torchvision.url, folder, filename=Torchvision.filename, md5=Torchvision.tgz_md5)
    for file in FILES:
        (folder / Torchvision.base_folder / file.name).replace(folder / file.name)


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one file of CIFAR-10.

    Returns:
        Images as uint8 of shape `(count, 3, 32, 32)`, and labels as int64 of shape `(count,)`.

    Raises:
        ValueError: The file is not a file of CIFAR-10; the message names it.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy 2.4 deprecates a form of dtype used in these pickles from 2009
            content = _ArrayUnpickler(file, encoding="latin1").load()
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        images = np.asarray(content["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(content["labels"], dtype=np.int64)
    except Exception as error:
        raise ValueError(f"corrupt: {path.resolve()} is not a CIFAR-10 file ({error})") from None
    if len(images) != len(labels) or (len(labels) and not 0 <= labels.min() <= labels.max() < 10):
        raise ValueError(f"corrupt: {path.resolve()} has {len(images)} images, but its labels do not match them")
    return torch.from_numpy(images.copy()), torch.from_numpy(labels)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that builds only numpy arrays and plain types; Python's calls any function that a pickle names."""

    ALLOWED = frozenset(
        {
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy._core.numeric", "_frombuffer"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy.core."):  # the name before numpy 2, used in the published files
            module = module.replace("numpy.core.", "numpy._core.")
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it contains a {module}.{name}, which is not an array")
        if not hasattr(np, "_core"):
            module = module.replace("numpy._core.", "numpy.core.")
        return super().find_class(module, name)
