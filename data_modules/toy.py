"""The data of the PyTorch DDP tutorial."""

from typing import Any

import torch

from data_modules.in_memory import InMemory, InMemoryData, at_least


class Toy(InMemoryData):
    """Random pairs of 20 features and 1 target, as in the PyTorch DDP tutorial; a model can learn only the mean.

    Args:
        count: Number of training pairs; the validation and test splits each have an eighth as many.
        data_seed: Seed of the pairs.
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        kwargs: See `InMemoryData`.
    """

    in_features = 20
    out_features = 1

    def __init__(self, count: int = 2048, data_seed: int = 0, batch_size: int = 32, **kwargs: Any) -> None:
        super().__init__(batch_size, **kwargs)
        self.count = at_least(1, "count", count)
        self.data_seed = data_seed

    def load(self) -> dict[str, InMemory]:
        """Draws the pairs and returns the splits."""
        held_out = max(1, self.count // 8)
        generator = torch.Generator().manual_seed(self.data_seed)
        return {
            split: InMemory(torch.rand(n, self.in_features, generator=generator), torch.rand(n, 1, generator=generator))
            for split, n in (("train", self.count), ("val", held_out), ("test", held_out))
        }
