"""Images in a folder tree with one folder per class, as ImageNet is stored."""

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from data_modules.in_memory import at_least, split_indices

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue in ImageNet, in levels from 0 to 1."""

NORMALIZE = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])

CHECK_SECONDS = 5.0
"""Time limit in seconds of the check at the start; damaged images not reached by it are reported when read."""

Sample = tuple[Path, int]


class ImageFolder(LightningDataModule):
    """Images in `root/train/CLASS/*.jpg` and `root/val/...`, optionally `root/test/...`; or in `root/CLASS/*.jpg`.

    Without `val`, a tenth of the training images is held out for validation. If `test` is missing as well, another
    tenth is held out for testing.

    Args:
        root: Root folder of the tree.
        image_size: Side length in pixels of the images that the model receives.
        augment: Whether training images are randomly cropped and mirrored.
        split_seed: Seed of the split, used if the tree has no `val` folder.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        num_workers: Number of DataLoader worker processes. If omitted: one per core, at most 4.
    """

    in_channels = 3

    def __init__(
        self,
        root: str,
        image_size: int = 224,
        augment: bool = True,
        split_seed: int = 0,
        batch_size: int = 64,
        num_workers: int | None = None,
    ) -> None:
        super().__init__()
        self.root = Path(root).expanduser()
        self.image_size = at_least(1, "image_size", image_size)
        self.in_features = 3 * image_size**2
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.num_workers = min(4, _core_count()) if num_workers is None else at_least(0, "num_workers", num_workers)
        self.augment, self.split_seed = augment, split_seed
        self.training = self.root / "train" if (self.root / "train").is_dir() else self.root
        self.classes = _classes(self.training)
        self.class_names = tuple(self.classes)
        self.num_classes = len(self.classes)
        self.splits: dict[str, list[Sample]] = {}
        self._statistics = torch.tensor([MEAN, STD])[:, :, None, None]

    def prepare_data(self) -> None:
        samples = [sample for split in self._samples().values() for sample in split]
        check_images([path for path, _ in samples], CHECK_SECONDS)

    def setup(self, stage: str) -> None:
        if not self.splits:
            self.splits = self._samples()
        if self.trainer is None or self.trainer.strategy.root_device.type != "cuda":
            return
        if not is_overridden("on_after_batch_transfer", self.trainer.lightning_module):
            # Not a method, which would cost time in each step on a CPU and take precedence over one of the model.
            self.on_after_batch_transfer = self._normalize  # type: ignore[method-assign]

    def _normalize(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Returns a batch with normalized images, which come to the GPU as bytes: a quarter of the memory."""
        images, labels = batch
        mean, std = self._statistics = self._statistics.to(images.device)
        assert self.trainer is not None
        normalized = images.float().div_(255).sub_(mean).div_(std)
        return self.trainer.precision_plugin.convert_input(normalized), labels  # it has seen bytes only

    def _samples(self) -> dict[str, list[Sample]]:
        existing = [split for split in ("val", "test") if self.training != self.root and (self.root / split).is_dir()]
        splits = {split: _images(self.root / split, self.classes) for split in existing}
        samples = _images(self.training, self.classes)
        if "val" in splits:
            return {"train": samples, **splits}
        held_out = len(samples) // 10
        if not held_out:
            raise ValueError(
                f"{self.training.resolve()} contains {len(samples)} images, too few to use a tenth for validation; "
                "add images, or divide them into train/ and val/"
            )
        missing_splits = [split for split in ("val", "test") if split not in splits]
        sizes = [len(samples) - len(missing_splits) * held_out, *[held_out] * len(missing_splits)]
        parts = zip(("train", *missing_splits), split_indices(sizes, self.split_seed), strict=True)
        return {**{split: [samples[i] for i in indices.tolist()] for split, indices in parts}, **splits}

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        if "test" not in self.splits:
            raise FileNotFoundError(f"{(self.root / 'test').resolve()} does not exist; type --split val")
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            ImageFiles(self.splits[split], self._transform(split), "on_after_batch_transfer" in vars(self)),
            batch_size=self.batch_size,
            shuffle=split == "train",
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def _transform(self, split: str) -> Callable[[Image.Image], Tensor]:
        if split == "train" and self.augment:
            geometry: list[v2.Transform] = [
                v2.RandomResizedCrop(self.image_size, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
        else:
            geometry = [v2.Resize(self.image_size * 8 // 7, antialias=True), v2.CenterCrop(self.image_size)]
        transform: Callable[[Image.Image], Tensor] = v2.Compose([v2.PILToTensor(), *geometry])
        return transform


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Data set of image files with their labels.

    Args:
        samples: Path and label of each image.
        transform: Function from an image to a tensor of bytes.
        as_bytes: Whether the tensors are returned as they are, not normalized.
    """

    def __init__(
        self, samples: Sequence[Sample], transform: Callable[[Image.Image], Tensor], as_bytes: bool = False
    ) -> None:
        self.samples, self.transform, self.as_bytes = samples, transform, as_bytes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = self.transform(read_image(path))
        return (image if self.as_bytes else NORMALIZE(image)), label


def read_image(path: Path) -> Image.Image:
    """Reads an image as RGB.

    Raises:
        ValueError: The file is not an image, or is damaged; the message names it.
    """
    try:
        with Image.open(path) as file:
            image: Image.Image = file.convert("RGB")
        return image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"corrupt: {path.resolve()} cannot be read as an image ({error}); replace or delete it"
        ) from None


def check_images(paths: Iterable[Path], seconds: float) -> None:
    """Reads images in random order for up to `seconds` seconds, to find damaged files before training begins.

    Raises:
        ValueError: An image is damaged; the message names it.
    """
    shuffled_paths = list(paths)
    random.Random(0).shuffle(shuffled_paths)
    deadline = time.monotonic() + seconds

    def check_image(path: Path) -> None:
        if time.monotonic() < deadline:
            read_image(path)

    with ThreadPoolExecutor(max_workers=min(8, _core_count())) as pool:
        for _ in pool.map(check_image, shuffled_paths):
            pass


def _classes(folder: Path) -> list[str]:
    """Returns the sorted names of the folders in `folder`, one per class."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the data folder {folder.resolve()} does not exist; type --data.root DIR, where DIR contains one folder "
            "per class, or train/ and val/ with such folders"
        )
    classes = _folders(folder)
    if not classes:
        raise FileNotFoundError(
            f"the data folder {folder.resolve()} contains no folders; it must contain one folder per class"
        )
    return classes


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path, classes: Sequence[str]) -> list[Sample]:
    """Returns the path and label of every image below `folder`, in a fixed order."""
    samples = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    if not samples:
        raise FileNotFoundError(
            f"the data folder {folder.resolve()} contains no images: its folders {', '.join(classes[:5])} have no "
            f"file with a known suffix ({', '.join(sorted(SUFFIXES))})"
        )
    if unknown := {*_folders(folder)} - {*classes}:
        raise ValueError(
            f"{folder.resolve()} has classes that are missing in the training folder: {', '.join(sorted(unknown))}"
        )
    return samples


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
