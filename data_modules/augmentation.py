"""What happens to a batch of pictures between memory and model."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Pictures:
    """Normalises a batch of pictures and, for training, crops and flips each at random.

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

    def __call__(self, pictures: Tensor) -> Tensor:
        """Turns pictures of shape `(batch, channels, height, width)`, of any type, into float32 of the same shape."""
        if self.padding:
            pictures = crop_at_random(pictures, self.padding)
        if self.flip:
            mirrored = torch.rand(len(pictures), 1, 1, 1) < 0.5
            pictures = torch.where(mirrored, pictures.flip(-1), pictures)
        return (pictures.float() - self.mean) / self.std


def crop_at_random(pictures: Tensor, padding: int) -> Tensor:
    """Pads every side with zeros and cuts each picture out anew at a place of its own.

    Args:
        pictures: Of shape `(batch, channels, height, width)`.
        padding: Pixels on each side.

    Returns:
        Pictures of the same shape.
    """
    count, channels, height, width = pictures.shape
    padded = torch.nn.functional.pad(pictures, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1))
    rows = (top + torch.arange(height))[:, None, :, None]
    columns = (left + torch.arange(width))[:, None, None, :]
    return padded[torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None], rows, columns]
