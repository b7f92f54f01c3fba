"""Handwritten digits included in scikit-learn: real data that needs no download."""

from typing import Any

import torch

from data_modules.augmentation import ImageTransform
from data_modules.in_memory import InMemory, InMemoryData, split_indices

SIZES = {"train": 1437, "val": 180, "test": 180}
MEAN, STD = (4.884,), (6.017,)
"""Mean and standard deviation of all images, in gray levels from 0 to 16."""


class Digits(InMemoryData):
    """scikit-learn's 1,797 digits of 8x8 pixels (test set of UCI Optical Recognition of Handwritten Digits).

    Args:
        augment: Whether training images are randomly shifted by up to 1 pixel.
        split_seed: Seed of the split into 1,437 images for training, 180 for validation and 180 for testing.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        kwargs: See `InMemoryData`.
    """

    in_channels = 1
    image_size = 8
    in_features = 64
    num_classes = 10
    class_names = tuple("0123456789")

    def __init__(self, augment: bool = True, split_seed: int = 0, batch_size: int = 64, **kwargs: Any) -> None:
        super().__init__(batch_size, **kwargs)
        self.augment, self.split_seed = augment, split_seed

    def load(self) -> dict[str, InMemory]:
        """Reads the images from scikit-learn and returns the splits."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.as_tensor(bunch.images).to(torch.uint8).unsqueeze(1)
        labels = torch.as_tensor(bunch.target)
        split_parts = dict(zip(SIZES, split_indices(list(SIZES.values()), self.split_seed), strict=True))
        return {
            split: InMemory(
                images[indices],
                labels[indices],
                ImageTransform(MEAN, STD, padding=1 if self.augment and split == "train" else 0),
            )
            for split, indices in split_parts.items()
        }
