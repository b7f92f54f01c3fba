"""Images of noise, of any size and number, for benchmarks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data_modules.in_memory import InMemoryData, OnDevice, at_least, gather_samples

POOL_SIZE = 512
"""Number of distinct images in memory; sample i is image i modulo this number."""


class NoiseImages(Dataset[tuple[Tensor, Tensor]]):
    """Data set of `count` images of normally distributed noise with random labels, taken from a small pool.

    Args:
        count: Length of the data set.
        shape: Shape of an image, `(channels, height, width)`.
        classes: Number of classes; labels are at least 0 and less than this.
        generator: Random generator that draws the pool.
    """

    draws_from_keys = True
    """Declares to Rankzero that reading samples draws no random numbers."""

    def __init__(self, count: int, shape: tuple[int, int, int], classes: int, generator: torch.Generator) -> None:
        self.count = count
        self.images = torch.randn(min(count, POOL_SIZE), *shape, generator=generator)
        self.labels = torch.randint(classes, (len(self.images),), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        position = range(self.count)[index] % len(self.images)
        return self.images[position], self.labels[position]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the batch of the samples at `indices`, read with one gather."""
        positions = np.asarray(indices, dtype=np.int64) % self.count % len(self.images)
        return gather_samples(self.images, positions), gather_samples(self.labels, positions)

    def on_device(self, device: torch.device) -> OnDevice | None:
        """Returns the same samples in the memory of a GPU, or None if they do not fit."""
        return OnDevice.if_it_fits((self.images, self.labels), device)


class SyntheticImages(InMemoryData):
    """Data module of images of noise.

    Args:
        count: Number of training images; the validation and test splits each have an eighth as many.
        image_size: Side length of an image in pixels.
        in_channels: Channels of an image.
        num_classes: Number of classes.
        data_seed: Seed of the noise and labels.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        kwargs: See `InMemoryData`.
    """

    def __init__(
        self,
        count: int = 4096,
        image_size: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
        data_seed: int = 0,
        batch_size: int = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size, **kwargs)
        self.count = at_least(1, "count", count)
        self.image_size = at_least(1, "image_size", image_size)
        self.in_channels = at_least(1, "in_channels", in_channels)
        self.num_classes = at_least(1, "num_classes", num_classes)
        self.in_features = in_channels * image_size**2
        self.data_seed = data_seed

    def load(self) -> dict[str, NoiseImages]:
        """Draws a pool for each split and returns the splits."""
        shape = (self.in_channels, self.image_size, self.image_size)
        held_out = max(1, self.count // 8)
        generator = torch.Generator().manual_seed(self.data_seed)
        return {
            split: NoiseImages(count, shape, self.num_classes, generator)
            for split, count in (("train", self.count), ("val", held_out), ("test", held_out))
        }
