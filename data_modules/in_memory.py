"""Data that fits in memory: held as tensors, gathered a batch at a time."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


class InMemory(Dataset[Batch]):
    """Inputs and targets as tensors.

    A batch is read with one gather (`__getitems__`), not sample by sample; the loader has to have
    `collate_fn=tuple`. What the transform draws for a sample comes from a key of its own: Rankzero's list of indices
    has one for each (`random_keys`); with any other list they are drawn from torch's generator.

    Args:
        inputs: Of shape `(count, ...)`.
        targets: Of shape `(count, ...)`.
        transform: From a batch of inputs, and 64 random bits for each as int64 of shape `(batch,)`, to what the model
            sees, such as `augmentation.ImageTransform`.
    """

    draws_from_keys = True
    """Tells Rankzero that nothing is drawn from the generators that the process shares."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, transform: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        assert len(inputs) == len(targets)
        self.inputs, self.targets, self.transform = inputs, targets, transform

    @property
    def reads_ahead(self) -> bool:
        """Tells Rankzero whether a sample is the same whatever else is read with it, and a little earlier."""
        alone = self.transform is None or bool(getattr(self.transform, "by_image", False))
        return alone and type(self).__getitems__ is InMemory.__getitems__

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns the batch at `indices`."""
        where = getattr(indices, "array", None)  # Rankzero's list has it at hand
        where = np.asarray(indices, dtype=np.int64) if where is None else where
        inputs, targets = gathered(self.inputs, where), gathered(self.targets, where)
        return (self.transform(inputs, random_keys(indices)) if self.transform else inputs), targets


def gathered(tensor: Tensor, where: NDArray[np.int64]) -> Tensor:
    """`tensor[where]`, by numpy: it copies a sample at a time where torch copies a number at a time."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # on a GPU, in a graph, or of a type that numpy has not
        return tensor[torch.from_numpy(where)]
    return torch.from_numpy(np.take(array, where, axis=0))


def random_keys(indices: Sequence[int]) -> Tensor:
    """64 random bits for each sample, int64 of shape `(len(indices),)`."""
    if hasattr(indices, "random_keys"):
        return torch.from_numpy(indices.random_keys.view(np.int64))
    return torch.randint(-(2**63), 2**63 - 1, (len(indices),))


class InMemoryData(LightningDataModule):
    """A data module whose splits are read a batch at a time, such as `InMemory`.

    Subclasses say in `load` where the splits come from. What a model has to know of the data (`in_features`,
    `in_channels`, `image_size`, `num_classes`, `out_features`) are attributes, known before anything is loaded.

    Args:
        batch_size: Samples a step on each device, where `--batch_size` does not say.
        num_workers: Loader processes; gathering from memory seldom needs any.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.splits: Mapping[str, Dataset[Batch]] = {}

    def load(self) -> Mapping[str, Dataset[Batch]]:
        """Returns the splits `train`, `val` and `test`."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        if not self.splits:
            self.splits = self.load()

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[Batch]:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=split == "train",
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=tuple,  # `__getitems__` has made the batch already
        )


def at_least(least: int, name: str, value: int) -> int:
    """Returns `value`, or raises the ValueError that a person sees."""
    if value < least:
        raise ValueError(f"--data.{name} is {value}; it has to be {least} or more")
    return value


def split_indices(sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Splits `range(sum(sizes))` at random into parts that do not overlap.

    Args:
        sizes: How many indices each part gets.
        seed: The same seed gives the same parts, on every machine and at every number of processes.
    """
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    return list(torch.split(order, list(sizes)))
