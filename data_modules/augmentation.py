"""Normalization and random augmentation of a batch of images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data_modules.parts import in_row_blocks


class ImageTransform:
    """Transform that normalizes a batch of images and, for training, randomly crops and flips each image.

    All random choices for an image are derived from the image's key, so that they do not depend on the rest of the
    batch.

    The transform runs in numpy, whose indexing copies whole rows where torch's indexing copies single pixels. See
    `in_row_blocks` for the threads.

    Args:
        mean: Mean of each channel, in the units in which the images are stored.
        std: Standard deviation of each channel, in the same units.
        padding: Largest random shift in each direction, in pixels; pixels shifted in are 0 before normalization.
        flip: Whether each image is mirrored with probability 1/2.
    """

    by_image = True
    """Whether the result for an image is independent of the rest of its batch."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], padding: int = 0, flip: bool = False) -> None:
        self.mean, self.std = (np.array(channel_values, np.float32)[:, None, None] for channel_values in (mean, std))
        self.padding, self.flip = padding, flip

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Returns the augmented and normalized images.

        Args:
            images: Tensor of shape `(batch, channels, height, width)`, of any dtype that numpy supports.
            keys: 64 random bits for each image, int64 of shape `(batch,)`.

        Returns:
            float32 tensor of the same shape as `images`.
        """
        transformed = np.empty(images.shape, np.float32)

        def transform_rows(rows: slice) -> None:
            block = images[rows]
            if self.padding:
                block = crop_at_random(block, self.padding, keys[rows])
            if self.flip:
                block = mirror_at_random(block, keys[rows])
            normalized = transformed[rows]
            normalized[...] = block.numpy()
            normalized -= self.mean
            normalized /= self.std

        in_row_blocks(transform_rows, len(images))
        return torch.from_numpy(transformed)

    def on_device(self, device: torch.device) -> "TransformOnDevice":
        """Returns the same transform for batches on a GPU."""
        return TransformOnDevice(self, device)


class TransformOnDevice:
    """The transform of an `ImageTransform`, with the same results, for batches on a GPU.

    Args:
        transform: The transform.
        device: The GPU.
    """

    def __init__(self, transform: ImageTransform, device: torch.device) -> None:
        self.mean, self.std = (torch.from_numpy(values).to(device) for values in (transform.mean, transform.std))
        self.padding, self.flip = transform.padding, transform.flip

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Returns the augmented and normalized images; one operation gathers the pixels of all crops."""
        samples, channels, rows, columns = (torch.arange(size, device=images.device) for size in images.shape)
        padding, rows, columns = self.padding, rows[:, None], columns[None, :]
        if self.flip:
            columns = torch.where((keys & 1 == 1)[:, None, None, None], columns.flip(1), columns)
        if padding:
            top, left = ((keys >> bits & 0xFFFFFF)[:, None, None, None] % (2 * padding + 1) for bits in (8, 36))
            images, rows, columns = pad(images, (padding,) * 4), rows + top, columns + left
        if self.flip or padding:
            images = images[samples[:, None, None, None], channels[:, None, None], rows, columns]
        return images.float().sub(self.mean).div_(self.std)


def crop_at_random(images: Tensor, padding: int, keys: Tensor) -> Tensor:
    """Pads all sides with zeros and crops each image to its former size at a random position.

    Args:
        images: Tensor of shape `(batch, channels, height, width)`.
        padding: Pixels added on each side.
        keys: 64 random bits for each image, int64 of shape `(batch,)`; the lowest bit is not used.

    Returns:
        Images of the same shape.
    """
    count, channels, height, width = images.shape
    pixels = images.numpy()
    padded = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), pixels.dtype)
    padded[:, :, padding : padding + height, padding : padding + width] = pixels
    image_stride, channel_stride, row_stride, pixel_stride = padded.strides
    windows = np.lib.stride_tricks.as_strided(  # (image, top, left) -> crop at this position
        padded,
        (count, 2 * padding + 1, 2 * padding + 1, channels, height, width),
        (image_stride, row_stride, pixel_stride, channel_stride, row_stride, pixel_stride),
        writeable=False,
    )
    top, left = ((keys.numpy() >> bits & 0xFFFFFF) % (2 * padding + 1) for bits in (8, 36))
    return torch.from_numpy(windows[np.arange(count), top, left])


def mirror_at_random(images: Tensor, keys: Tensor) -> Tensor:
    """Mirrors a random half of the images: left becomes right.

    Args:
        images: Tensor of shape `(batch, channels, height, width)`.
        keys: 64 random bits for each image, int64 of shape `(batch,)`; only the lowest bit is used.

    Returns:
        Images of the same shape.
    """
    mirrored = images.numpy().copy()
    indices = np.flatnonzero(keys.numpy() & 1)
    if mirrored.dtype == np.uint8 and mirrored.shape[-1] % 8 == 0:  # reverses eight pixels at a time
        words = mirrored.view(np.uint64)
        words[indices] = words[indices][..., ::-1].byteswap()
    else:
        mirrored[indices] = mirrored[indices, ..., ::-1]
    return torch.from_numpy(mirrored)
