"""What happens to a batch of images between memory and model."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data_modules.parts import in_row_blocks


class ImageTransform:
    """Normalises a batch of images and, for training, crops and flips each at random.

    What is random in an image comes from its key alone, so that it does not depend on which batch it is read in.

    All is done by numpy: its indexing copies rows where torch's copies pixels, and see `in_row_blocks` for the threads.

    Args:
        mean: Of each channel, in the units that the images are stored in.
        std: Likewise.
        padding: Pixels by which an image may be shifted each way; what is shifted in is 0.
        flip: Whether half of the images are mirrored.
    """

    by_image = True
    """Whether an image comes out the same whatever else is in its batch."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], padding: int = 0, flip: bool = False) -> None:
        self.mean, self.std = (np.array(of_channels, np.float32)[:, None, None] for of_channels in (mean, std))
        self.padding, self.flip = padding, flip

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Turns images into what the model sees.

        Args:
            images: Of shape `(batch, channels, height, width)`, of any type that numpy has.
            keys: 64 random bits for each image, int64 of shape `(batch,)`.

        Returns:
            float32 of the same shape as the images.
        """
        seen = np.empty(images.shape, np.float32)

        def work(part: slice) -> None:
            block = images[part]
            if self.padding:
                block = crop_at_random(block, self.padding, keys[part])
            if self.flip:
                block = mirror_at_random(block, keys[part])
            normalised = seen[part]
            normalised[...] = block.numpy()
            normalised -= self.mean
            normalised /= self.std

        in_row_blocks(work, len(images))
        return torch.from_numpy(seen)


def crop_at_random(images: Tensor, padding: int, keys: Tensor) -> Tensor:
    """Pads every side with zeros and cuts each image out anew at a place of its own.

    Args:
        images: Of shape `(batch, channels, height, width)`.
        padding: Pixels on each side.
        keys: 64 random bits for each image, int64 of shape `(batch,)`, of which the lowest is not used.

    Returns:
        Images of the same shape.
    """
    count, channels, height, width = images.shape
    pixels = images.numpy()
    padded = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), pixels.dtype)
    padded[:, :, padding : padding + height, padding : padding + width] = pixels
    of_image, of_channel, of_row, of_pixel = padded.strides
    windows = np.lib.stride_tricks.as_strided(  # image, top, left -> what is cut out there
        padded,
        (count, 2 * padding + 1, 2 * padding + 1, channels, height, width),
        (of_image, of_row, of_pixel, of_channel, of_row, of_pixel),
        writeable=False,
    )
    top, left = ((keys.numpy() >> bits & 0xFFFFFF) % (2 * padding + 1) for bits in (8, 36))
    return torch.from_numpy(windows[np.arange(count), top, left])


def mirror_at_random(images: Tensor, keys: Tensor) -> Tensor:
    """Mirrors half of the images: left becomes right.

    Args:
        images: Of shape `(batch, channels, height, width)`.
        keys: 64 random bits for each image, int64 of shape `(batch,)`, of which the lowest alone is used.

    Returns:
        Images of the same shape.
    """
    mirrored = images.numpy().copy()
    which = np.flatnonzero(keys.numpy() & 1)
    if mirrored.dtype == np.uint8 and mirrored.shape[-1] % 8 == 0:  # eight pixels at a time
        words = mirrored.view(np.uint64)
        words[which] = words[which][..., ::-1].byteswap()
    else:
        mirrored[which] = mirrored[which, ..., ::-1]
    return torch.from_numpy(mirrored)
