"""What happens to a batch of pictures between memory and model."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pictures:
    """Normalises a batch of pictures and, for training, crops and flips each at random.

    What is random in a picture comes from its key alone, so that it does not depend on which batch it is read in.

    Args:
        mean: Of each channel, in the units that the pictures are stored in.
        std: Likewise.
        padding: Pixels by which a picture may be shifted each way; what is shifted in is 0.
        flip: Whether half of the pictures are mirrored.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], padding: int = 0, flip: bool = False) -> None:
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.std = torch.tensor(std).view(1, -1, 1, 1)
        self.padding, self.flip = padding, flip

    def __call__(self, pictures: Tensor, keys: Tensor) -> Tensor:
        """Turns pictures into what the model sees.

        Args:
            pictures: Of shape `(batch, channels, height, width)`, of any type.
            keys: 64 random bits for each picture, int64 of shape `(batch,)`.

        Returns:
            float32 of the same shape as the pictures.
        """
        if self.padding:
            pictures = crop_at_random(pictures, self.padding, keys)
        if self.flip:
            mirrored = (keys & 1).bool()[:, None, None, None]
            pictures = torch.where(mirrored, pictures.flip(-1), pictures)
        return (pictures.float() - self.mean) / self.std


def crop_at_random(pictures: Tensor, padding: int, keys: Tensor) -> Tensor:
    """Pads every side with zeros and cuts each picture out anew at a place of its own.

    Args:
        pictures: Of shape `(batch, channels, height, width)`.
        padding: Pixels on each side.
        keys: 64 random bits for each picture, int64 of shape `(batch,)`, of which the lowest is not used.

    Returns:
        Pictures of the same shape.
    """
    count, channels, height, width = pictures.shape
    padded = torch.nn.functional.pad(pictures, (padding,) * 4)
    top, left = (((keys >> bits) & 0xFFFFFF).remainder(2 * padding + 1)[:, None] for bits in (8, 36))
    rows = (top + torch.arange(height))[:, None, :, None]
    columns = (left + torch.arange(width))[:, None, None, :]
    return padded[torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None], rows, columns]
