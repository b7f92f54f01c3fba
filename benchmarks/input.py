"""CIFAR-10 images, cropped, mirrored and normalized in batches of 512: Rankzero compared with torchvision.

python benchmarks/input.py                   # microseconds per image, on two cores: whole epochs of 45,000 images

The images are noise in the format of CIFAR-10's files. Rankzero reads them in the main process, which is its default.
torchvision uses two worker processes, which are already running when an epoch begins. The last variant draws a single
crop for all images of a batch and mirrors all images or none, as v2's transforms do with a batch. It does less work
than the other variants.
"""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest import Comparison, parser
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision import datasets, transforms
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).parent.parent))

from data_modules.cifar10 import CIFAR10, FILES, MEAN, STD
from rankzero.sampling.plan import SamplingPlan

BATCH, WORKERS = 512, 2
LEVELS = {"mean": [value / 255 for value in MEAN], "std": [value / 255 for value in STD]}
"""Mean and standard deviation for torchvision, where the levels of an image range from 0 to 1."""


def rankzero_loader(folder: Path) -> Iterable[Any]:
    """Returns the data module's training loader as a run reads it."""
    module = CIFAR10(root=str(folder), verify=False, batch_size=BATCH)
    module.prepare_data()
    module.setup("fit")
    loader: Iterable[Any] = SamplingPlan(rank=0, world_size=1, seed=0).wrap(  # type: ignore[assignment]
        module.train_dataloader(), training=True
    )
    return loader


class Noise(datasets.CIFAR10):
    """torchvision's CIFAR-10 with 45,000 images, and without its check for the published files."""

    def _check_integrity(self) -> bool:
        return True

    def _load_meta(self) -> None:
        self.data, self.targets = self.data[:45_000], self.targets[:45_000]


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """Data set of images in one tensor, transformed one batch at a time."""

    def __init__(self, data: datasets.CIFAR10, transform: Callable[[Tensor], Tensor]) -> None:
        self.images, self.labels = torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[indices]), self.labels[indices]


def torchvision_loader(folder: Path, transform: Callable[[Any], Tensor]) -> Iterable[Any]:
    """Returns a loader as in a tutorial."""
    data = Noise(str(folder), transform=transform)
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)


def whole_batch_loader(folder: Path, transform: Callable[[Tensor], Tensor]) -> Iterable[Any]:
    """Returns a loader that applies the transforms to whole batches."""
    data = WholeBatches(Noise(str(folder)), transform)
    order = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
    return DataLoader(data, batch_size=None, sampler=order, num_workers=WORKERS, persistent_workers=True)


def epoch_timer(make_loader: Callable[[], Iterable[Any]]) -> Callable[[], float]:
    """Returns a function that reads one epoch and returns microseconds per image; its first call warms up first."""
    loaders: list[Iterable[Any]] = []

    def measure() -> float:
        if not loaders:
            loaders.append(make_loader())
            _read_epoch(loaders[0])
        started = time.perf_counter()
        count = _read_epoch(loaders[0])
        return (time.perf_counter() - started) / count * 1e6

    return measure


def _read_epoch(loader: Iterable[Any]) -> int:
    count = 0
    for images, _ in loader:
        assert images.dtype is torch.float32 and images.shape[1:] == (3, 32, 32)
        count += len(images)
    return count


def write_noise(folder: Path) -> None:
    """Writes 60,000 images of noise in the format of CIFAR-10's files."""
    generator = np.random.default_rng(0)
    (folder / "cifar-10-batches-py").mkdir()
    for file in FILES:
        data = generator.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, 10_000).tolist()
        (folder / "cifar-10-batches-py" / file.name).write_bytes(pickle.dumps({"data": data, "labels": labels}))


def main() -> None:
    """Measures all variants in turn."""
    arguments = parser(__doc__).parse_args()
    v1_transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**LEVELS),
        ]
    )
    v2_steps = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)]
    v2_transform = v2.Compose([v2.ToImage(), *v2_steps, v2.Normalize(**LEVELS)])
    v2_batch_transform = v2.Compose([*v2_steps, v2.Normalize(**LEVELS)])
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_noise(folder)
        Comparison(
            name="input",
            title=f"CIFAR-10 with crop, mirror and normalization, in batches of {BATCH}",
            unit="microseconds per image",
            measure={
                "ours, in the main process": epoch_timer(lambda: rankzero_loader(folder)),
                f"torchvision, {WORKERS} loader processes": epoch_timer(
                    lambda: torchvision_loader(folder, v1_transform)
                ),
                f"torchvision v2, {WORKERS} loader processes": epoch_timer(
                    lambda: torchvision_loader(folder, v2_transform)
                ),
                f"torchvision v2 on whole batches, {WORKERS}": epoch_timer(
                    lambda: whole_batch_loader(folder, v2_batch_transform)
                ),
            },
            targets={f"torchvision, {WORKERS} loader processes": 0.05},
        ).run(arguments.pairs, arguments.json_dir)


if __name__ == "__main__":
    main()
