"""Images made of noise, of any size and number, for measuring."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data_modules.in_memory import InMemoryData, at_least, gathered

POOL = 512
"""Different images held in memory; sample i is image i modulo this."""


class NoiseImages(Dataset[tuple[Tensor, Tensor]]):
    """`count` images of normal noise with random labels, drawn from a small pool.

    Args:
        count: How many there appear to be.
        shape: `(channels, height, width)`.
        classes: Labels run from 0 to this, exclusive.
        generator: Draws the pool.
    """

    draws_from_keys = True
    """Tells Rankzero that nothing is drawn while samples are read."""

    def __init__(self, count: int, shape: tuple[int, int, int], classes: int, generator: torch.Generator) -> None:
        self.count = count
        self.images = torch.randn(min(count, POOL), *shape, generator=generator)
        self.labels = torch.randint(classes, (len(self.images),), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        where = range(self.count)[index] % len(self.images)
        return self.images[where], self.labels[where]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the batch at `indices`, gathered at once."""
        where = np.asarray(indices, dtype=np.int64) % self.count % len(self.images)
        return gathered(self.images, where), gathered(self.labels, where)


class SyntheticImages(InMemoryData):
    """Noise in the shape of images.

    Args:
        count: Training images; there are an eighth as many each to validate and to test.
        image_size: Pixels of a side.
        in_channels: Channels.
        num_classes: Classes.
        data_seed: Seed of the noise.
        batch_size: Samples a step on each device, where `--batch_size` does not say.
        num_workers: Loader processes.
    """

    def __init__(
        self,
        count: int = 4096,
        image_size: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
        data_seed: int = 0,
        batch_size: int = 128,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.count = at_least(1, "count", count)
        self.image_size = at_least(1, "image_size", image_size)
        self.in_channels = at_least(1, "in_channels", in_channels)
        self.num_classes = at_least(1, "num_classes", num_classes)
        self.in_features = in_channels * image_size**2
        self.data_seed = data_seed

    def load(self) -> dict[str, NoiseImages]:
        """Draws the pools."""
        shape = (self.in_channels, self.image_size, self.image_size)
        held_out = max(1, self.count // 8)
        generator = torch.Generator().manual_seed(self.data_seed)
        return {
            split: NoiseImages(count, shape, self.num_classes, generator)
            for split, count in (("train", self.count), ("val", held_out), ("test", held_out))
        }
