"""Reads samples so that what is random in one is a function of seed, epoch and sample."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from rankzero.sampling import generators
from rankzero.sampling.index_list import Indices
from rankzero.sampling.permutation import Positions


class SeededDataset(Dataset[Any]):
    """A data set, read with the generators seeded for each sample: the same crop in any worker, process or attempt.

    A data set with `__getitems__` is read a batch at a time, with the generators seeded for the batch; what it draws
    then depends on the batch too, unless it draws from `Indices.random_keys`.

    Seeding costs 6 microseconds a sample. A data set that draws nothing is spared them: after a batch without a draw
    the generators are only looked at, before and behind each batch, and should one have been drawn from after all, the
    batch is read once more, seeded. One that says `draws_from_keys = True` is not even looked at.

    Tensors that are to be collated sample by sample are gathered a batch at a time, which gives the same batch.

    Args:
        dataset: The data set.
        gathers: Whether samples are to be collated by torch's `default_collate`.

    Attributes:
        gathers: Whether they are collated here.
        gathers_rows: Whether that takes no more than the samples' numbers.
        reads_ahead: Whether several batches may be read as one, as a data set says with `reads_ahead = True`: it
            returns tensors, one row a sample, whatever else is read with it and when.
    """

    def __init__(self, dataset: Dataset[Any], gathers: bool = False) -> None:
        self.dataset = self._source = dataset
        self._parts: list[Sequence[int]] = []
        # A Subset has __getitems__ whether what it is a part of has it or not, and hands on a plain list.
        while isinstance(self._source, Subset) and type(self._source).__getitems__ is Subset.__getitems__:
            self._parts.append(self._source.indices)
            self._source = self._source.dataset
        self._reads_batches = callable(getattr(self._source, "__getitems__", None))
        self._needs_no_seed = type(self._source) is TensorDataset or getattr(self._source, "draws_from_keys", False)
        self.gathers = gathers and type(self._source) is TensorDataset and all(map(_is_plain, self._source.tensors))
        self.gathers_rows = self.gathers and not self._parts
        self.reads_ahead = self._reads_batches and bool(getattr(self._source, "reads_ahead", False)) and not self._parts
        self._draws: bool | None = None
        """Whether it draws; unknown before the first batch."""

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while a loader process unpickles this
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Indices) -> Any:
        """Returns the samples, as a list or as the data set makes a batch of them; None where there are none."""
        if not indices:
            return None
        indices = self._within_source(indices)
        if self._needs_no_seed:
            return self._read(indices)
        before = generators.look()
        if self._draws is False:
            samples = self._read(indices)
            if not generators.drawn_since(before):
                return samples
            self._draws = True
        try:
            return self._read_seeded(indices)
        finally:
            generators.put_back(before)

    def gather(self, samples: Positions) -> list[Tensor] | None:
        """Returns the rows of these samples, one tensor per field; None for an empty batch. Requires `gathers`."""
        if not samples.size:
            return None
        where = torch.from_numpy(samples)
        if self._parts:  # the indices of a Subset may be negative
            where = where.remainder(len(self._source))  # type: ignore[arg-type]
        return [tensor.index_select(0, where) for tensor in self._source.tensors]  # type: ignore[attr-defined]

    def _within_source(self, indices: Indices) -> Indices:
        samples: Sequence[int] = indices
        for part in self._parts:
            samples = [part[sample] for sample in samples]
        return Indices(samples, indices.key, indices) if self._parts else indices

    def _read(self, indices: Indices) -> Any:
        if self.gathers:
            return self.gather(indices.array)
        if self._reads_batches:
            return self._source.__getitems__(indices)  # type: ignore[attr-defined]
        return [self._source[index] for index in indices]

    def _read_seeded(self, indices: Indices) -> Any:
        keys = indices.random_keys.tolist()
        reads = [(sum(keys) % 2**64, indices)] if self._reads_batches else list(zip(keys, indices, strict=True))
        draws, samples = bool(self._draws), []
        for key, what in reads:
            generators.seed(key)
            if not draws:  # comparing the next draw takes a tenth of the time of comparing states (0.2 ms per sample)
                first = generators.draw()
                generators.seed(key)
            samples.append(self._read(what) if self._reads_batches else self._source[what])  # type: ignore[arg-type]
            draws = draws or generators.draw() != first
        self._draws = draws
        return samples[0] if self._reads_batches else samples


def _is_plain(tensor: Tensor) -> bool:
    """Whether a gather of its rows is what stacking them is."""
    strided = tensor.layout == torch.strided and tensor.is_cpu and not tensor.is_quantized
    return type(tensor) is Tensor and strided and tensor.is_contiguous() and not tensor.requires_grad
