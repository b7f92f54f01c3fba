"""Reads samples whose random transforms depend only on seed, epoch and sample."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from rankzero.sampling import generators
from rankzero.sampling.permutation import Indices, Positions


class SeededDataset(Dataset[Any]):
    """Data set that seeds the generators for each sample: any worker, process or attempt draws the same crop.

    A data set with `__getitems__` is read one batch at a time, with the generators seeded for the batch. Its random
    numbers then also depend on the batch, unless it draws from `Indices.random_keys`.

    Seeding costs 6 microseconds per sample, so a data set that draws no random numbers is not seeded. After a batch
    without a draw, the generators' states are only compared before and after each batch. If they differ, the batch is
    read again with seeds. A data set with `draws_from_keys = True` is not even checked.

    If the loader uses torch's `default_collate`, a batch of a TensorDataset is gathered at once, with the same result
    (`gathers`). A loader that is not `is_batched` reads single items, which may be batches.

    Attributes:
        gathers: Whether batches are gathered here, so that nothing is left to collate.
        gathers_rows: Whether the sample indices are the row indices for the gather, without a Subset in between.
        reads_ahead: Whether several batches may be read as one. A data set permits this with `reads_ahead = True` if it
            returns tensors with one row per sample, and no row depends on other samples or on the time of the read.
    """

    def __init__(self, dataset: Dataset[Any], gathers: bool = False, is_batched: bool = True) -> None:
        self.dataset, self._source = dataset, cast(Any, dataset)
        self._subset_indices: list[Sequence[int]] = []
        # A Subset always has __getitems__, even if its data set has none, and passes a plain list to it.
        while is_batched and getattr(type(self._source), "__getitems__", None) is Subset.__getitems__:
            self._subset_indices.append(self._source.indices)
            self._source = self._source.dataset
        self._reads_batches = is_batched and callable(getattr(self._source, "__getitems__", None))
        self._needs_no_seed = type(self._source) is TensorDataset or getattr(self._source, "draws_from_keys", False)
        self.gathers = gathers and type(self._source) is TensorDataset and all(map(_is_plain, self._source.tensors))
        self.gathers_rows = self.gathers and not self._subset_indices
        may_read_ahead = self._reads_batches and not self._subset_indices
        self.reads_ahead = may_read_ahead and bool(getattr(self._source, "reads_ahead", False))
        self._draws: bool | None = None
        """Whether the data set draws random numbers; None before the first batch."""

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet while a loader process unpickles this object
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Indices) -> Any:
        """Returns a list of samples, or the batch that the data set makes of them; None for an empty batch."""
        if not indices:
            return None
        try:
            return self._read_unseeded_or_seeded(self._source_indices(indices))
        except StopIteration as error:  # would end the epoch early
            raise RuntimeError("the data set raised StopIteration") from error

    def _read_unseeded_or_seeded(self, indices: Indices) -> Any:
        if self._needs_no_seed:
            return self._read(indices)
        states = generators.get_states()
        if self._draws is False:
            samples = self._read(indices)
            if not generators.have_changed_since(states):
                return samples
            self._draws = True
        try:
            return self._read_seeded(indices)
        finally:
            generators.set_states(states)

    def gather(self, samples: Positions) -> list[Tensor] | None:
        """Returns the rows of these samples, one tensor per field; None for an empty batch. Requires `gathers`."""
        if not samples.size:
            return None
        rows = torch.from_numpy(samples)
        if self._subset_indices:  # the indices of a Subset may be negative
            rows = rows.remainder(len(self._source))
        return [tensor.index_select(0, rows) for tensor in self._source.tensors]

    def _source_indices(self, indices: Indices) -> Indices:
        samples: Sequence[int] = indices
        for subset_indices in self._subset_indices:
            samples = [subset_indices[sample] for sample in samples]
        return Indices(samples, indices.key, indices.loader_indices or indices) if self._subset_indices else indices

    def _read(self, indices: Indices) -> Any:
        if self.gathers:
            return self.gather(indices.array)
        if self._reads_batches:
            return self._source.__getitems__(indices)
        return [self._source[index] for index in indices]

    def _read_seeded(self, indices: Indices) -> Any:
        keys = indices.random_keys.tolist()
        reads = [(sum(keys) % 2**64, indices)] if self._reads_batches else list(zip(keys, indices, strict=True))
        draws, samples = bool(self._draws), []
        for key, item in reads:
            generators.seed(key)
            if not draws:  # comparing the next draw takes a tenth of the time of comparing states (0.2 ms per sample)
                first_draw = generators.draw()
                generators.seed(key)
            samples.append(self._read(item) if self._reads_batches else self._source[item])  # type: ignore[arg-type]
            draws = draws or generators.draw() != first_draw
        self._draws = draws
        return samples[0] if self._reads_batches else samples


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether gathering rows of this tensor gives the same result as stacking them."""
    is_strided = tensor.layout == torch.strided and tensor.is_cpu and not tensor.is_quantized
    return type(tensor) is Tensor and is_strided and tensor.is_contiguous() and not tensor.requires_grad
