"""The validation samples with the largest losses, over all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rankzero.tracking.figures.class_counts import IGNORED_TARGET
from rankzero.training.strategies import RunStrategy

MAX_SAMPLES = 16
MAX_PIXELS = 96
"""Largest side of a stored image."""

_NO_SAMPLE = -1.0
"""Loss in the row of a rank that has fewer samples."""


@dataclass(frozen=True)
class WorstSample:
    """Sample with a large loss.

    Args:
        loss: Cross-entropy.
        predicted: The predicted class.
        true: The true class.
        image: Image of shape `(channels, height, width)`.
    """

    loss: float
    predicted: int
    true: int
    image: Tensor


class WorstSamples:
    """Keeps the samples of this rank with the largest cross-entropy, if all images have the same shape.

    Attributes:
        shape: Shape of the images: channels, height and width; zeros if there are no usable images.
    """

    def __init__(self) -> None:
        self.shape = (0, 0, 0)
        self.samples: list[WorstSample] = []
        self._is_usable = True

    def add(self, logits: Tensor, targets: Tensor, images: Tensor | None) -> None:
        """Adds a batch.

        Args:
            logits: Tensor of shape `(batch, classes)`.
            targets: int64 tensor of shape `(batch,)`.
            images: Images of the batch; None if it has none.
        """
        shape = (0, 0, 0) if images is None else stored_shape(images)
        if not self._is_usable or images is None or self.shape not in ((0, 0, 0), shape):
            self._is_usable, self.shape, self.samples = False, (0, 0, 0), []
            return
        self.shape = shape
        losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED_TARGET)
        losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(targets == IGNORED_TARGET, _NO_SAMPLE)
        largest, positions = losses.topk(min(MAX_SAMPLES, len(losses)))
        least = self.samples[-1].loss if len(self.samples) == MAX_SAMPLES else _NO_SAMPLE
        count = int((largest > least).sum())
        if not count:
            return
        positions = positions[:count]
        predicted, true = logits[positions].argmax(1).tolist(), targets[positions].tolist()
        stored = downscaled(images[positions.to(images.device)])
        new = map(WorstSample, largest[:count].tolist(), predicted, true, stored)
        self.samples = sorted([*self.samples, *new], key=lambda sample: -sample.loss)[:MAX_SAMPLES]

    def row(self) -> Tensor:
        """Returns loss, predicted class and true class of each kept sample, as one float64 row of fixed length."""
        rows = torch.full((MAX_SAMPLES, 3), _NO_SAMPLE, dtype=torch.float64)
        for number, sample in enumerate(self.samples):
            rows[number] = torch.tensor([sample.loss, sample.predicted, sample.true], dtype=torch.float64)
        return rows.flatten()

    def gather(self, strategy: RunStrategy, rank: int, shape: tuple[int, int, int]) -> list[WorstSample]:
        """Returns the worst samples of all ranks, the worst one first. All ranks must call.

        Args:
            strategy: Exchanges values between ranks.
            rank: This rank.
            shape: Shape of the images, equal on all ranks.
        """
        rows = strategy.gather_rows(self.row()).view(-1, MAX_SAMPLES, 3).tolist()
        found = [(*values, owner, number) for owner, row in enumerate(rows) for number, values in enumerate(row)]
        winners = sorted((entry for entry in found if entry[0] >= 0), key=lambda entry: -entry[0])[:MAX_SAMPLES]
        images = torch.zeros(len(winners), *shape)
        for place, (_, _, _, owner, number) in enumerate(winners):
            if owner == rank:
                images[place] = self.samples[number].image
        if winners:
            images = images.to(strategy.root_device)
            strategy.reduce_in_place(images, "sum")
        return [
            WorstSample(loss, int(predicted), int(true), image)
            for (loss, predicted, true, _, _), image in zip(winners, images.cpu(), strict=True)
        ]


def stored_shape(images: Tensor) -> tuple[int, int, int]:
    """Returns channels, height and width of images after `downscaled`."""
    channels, height, width = images.shape[1:]
    factor = min(1.0, MAX_PIXELS / max(height, width))
    return channels, max(1, round(height * factor)), max(1, round(width * factor))


def downscaled(images: Tensor) -> Tensor:
    """Returns images of at most `MAX_PIXELS` pixels in height and width, as finite float32 on the CPU."""
    _, height, width = stored_shape(images)
    pixels = images.detach().float().nan_to_num()
    if (height, width) != tuple(images.shape[2:]):
        pixels = F.adaptive_avg_pool2d(pixels, (height, width))
    return pixels.cpu()
