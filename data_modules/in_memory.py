"""Data that fits in memory: stored as tensors, and gathered one batch at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]

DEVICE_SHARE = 1 / 8
"""Largest share of a GPU's free memory that a split may take."""


class InMemory(Dataset[Batch]):
    """Data set of inputs and targets, stored as tensors.

    A batch is read with one gather (`__getitems__`) instead of sample by sample; the DataLoader needs
    `collate_fn=tuple`. The transform derives the random choices for a sample from the sample's key. Rankzero's list of
    indices provides the keys (`random_keys`); for any other list they are drawn from torch's generator.

    Args:
        inputs: Tensor of shape `(count, ...)`.
        targets: Tensor of shape `(count, ...)`.
        transform: Function from a batch of inputs and their keys (64 random bits for each sample, int64 of shape
            `(batch,)`) to the tensor that the model receives, such as `augmentation.ImageTransform`.
    """

    draws_from_keys = True
    """Declares to Rankzero that reading samples draws nothing from the process-wide random generators."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, transform: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        assert len(inputs) == len(targets)
        self.inputs, self.targets, self.transform = inputs, targets, transform

    @property
    def reads_ahead(self) -> bool:
        """Whether Rankzero may read batches together and in advance: no sample depends on the rest of its batch."""
        is_per_sample = self.transform is None or bool(getattr(self.transform, "by_image", False))
        return is_per_sample and type(self).__getitems__ is InMemory.__getitems__

    def on_device(self, device: torch.device) -> "OnDevice | None":
        """Returns the same samples in the memory of a GPU, or None if they do not fit or need the processor."""
        transform = self.transform
        if type(self).__getitems__ is not InMemory.__getitems__ or (transform and not hasattr(transform, "on_device")):
            return None
        return OnDevice.if_it_fits((self.inputs, self.targets), device, transform and transform.on_device(device))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Returns the batch of the samples at `indices`."""
        positions = getattr(indices, "array", None)  # Rankzero's list of indices stores an array too
        positions = np.asarray(indices, dtype=np.int64) if positions is None else positions
        inputs, targets = gather_samples(self.inputs, positions), gather_samples(self.targets, positions)
        return (self.transform(inputs, random_keys(indices)) if self.transform else inputs), targets


class OnDevice(Dataset[Batch]):
    """Data set of inputs and targets in the memory of a GPU, which gathers and transforms batches there.

    Args:
        samples: Inputs and targets; sample i is row i modulo their length.
        device: The GPU.
        transform: As in `InMemory`, but it gets tensors on the GPU.
    """

    draws_from_keys = reads_ahead = True

    def __init__(
        self, samples: Batch, device: torch.device, transform: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        self.inputs, self.targets = (tensor.to(device) for tensor in samples)
        self.device, self.transform = device, transform

    @classmethod
    def if_it_fits(cls, samples: Batch, device: torch.device, *transform: Any) -> "OnDevice | None":
        """Returns the data set, or None if the samples take too much of the GPU's free memory."""
        free, _ = torch.cuda.mem_get_info(device)
        return cls(samples, device, *transform) if sum(t.nbytes for t in samples) <= DEVICE_SHARE * free else None

    def __getitems__(self, indices: Any) -> Batch:
        """Returns the batch of the samples at `indices`, which is Rankzero's list of indices."""
        rows = self._upload(indices.array % len(self.inputs))
        inputs, targets = self.inputs.index_select(0, rows), self.targets.index_select(0, rows)
        return (self.transform(inputs, self._upload(random_keys(indices))) if self.transform else inputs), targets

    def _upload(self, numbers: Tensor | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(numbers).pin_memory().to(self.device, non_blocking=True)


def gather_samples(tensor: Tensor, positions: NDArray[np.int64]) -> Tensor:
    """Returns `tensor[positions]`, gathered by numpy, which copies whole samples where torch copies single numbers."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # on a GPU, in an autograd graph, or of a dtype that numpy lacks
        return tensor[torch.from_numpy(positions)]
    return torch.from_numpy(np.take(array, positions, axis=0))


def random_keys(indices: Sequence[int]) -> Tensor:
    """Returns 64 random bits for each sample, as int64 of shape `(len(indices),)`."""
    if hasattr(indices, "random_keys"):
        return torch.from_numpy(indices.random_keys.view(np.int64))
    return torch.randint(-(2**63), 2**63 - 1, (len(indices),))


class InMemoryData(LightningDataModule, ABC):
    """Base class of data modules whose splits are read one batch at a time, such as `InMemory`.

    Subclasses implement `load`. The properties of the data that a model needs (`in_features`, `in_channels`,
    `image_size`, `num_classes`, `out_features`) are attributes that are available before the data is loaded. Images of
    a run show the names in the attribute `class_names`.

    Args:
        batch_size: Samples per step on each device, if `--batch_size` is omitted.
        num_workers: Number of DataLoader worker processes; gathering from memory rarely needs any.
        device: Where a run on a GPU reads batches: `auto` is the GPU, for a split that takes at most an eighth of its
            free memory and without workers; `cpu` is the host.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0, device: Literal["auto", "cpu"] = "auto") -> None:
        super().__init__()
        self.device = device
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.num_workers = at_least(0, "num_workers", num_workers)
        self.splits: Mapping[str, Dataset[Batch]] = {}

    @abstractmethod
    def load(self) -> Mapping[str, Dataset[Batch]]:
        """Returns the splits `train`, `val` and `test`."""

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
            pin_memory=self.device == "auto" and torch.cuda.is_available(),
            collate_fn=tuple,  # `__getitems__` returns a complete batch
        )


def at_least(minimum: int, name: str, value: int) -> int:
    """Returns `value`, or raises a ValueError for the user if `value` is less than `minimum`."""
    if value < minimum:
        raise ValueError(f"--data.{name} is {value}; it must be {minimum} or more")
    return value


def split_indices(sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Splits `range(sum(sizes))` randomly into disjoint parts.

    Args:
        sizes: Number of indices in each part.
        seed: The same seed gives the same parts, on every machine and with any number of processes.
    """
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    return list(torch.split(order, list(sizes)))
