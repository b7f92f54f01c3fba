"""Prediction in the run's order of samples, including a short last batch."""

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from rankzero.sampling.batch_sampler import EvaluationBatchSampler
from rankzero.sampling.loader import ManagedLoader
from rankzero.training import lightning_inside as stock


class PredictionLoop(stock.PredictionLoop):
    """Lightning's loop, but it keeps a short last batch and passes each batch's samples to a BasePredictionWriter."""

    def setup_data(self) -> None:
        with stock.prepared_by(self.trainer, _with_last_batch):
            super().setup_data()
        if self._combined_loader is not None:
            for loader in self._combined_loader.flattened:
                if (
                    isinstance(loader, DataLoader)
                    and not isinstance(loader, ManagedLoader)  # has the user's own order
                    and isinstance(loader.batch_sampler, Sampler)
                    and not isinstance(loader.dataset, IterableDataset)  # its samples have no numbers
                ):
                    vars(loader)["batch_sampler"] = stock.IndexBatchSampler(loader.batch_sampler)  # type: ignore[arg-type]

    def _get_batch_indices(self, dataloader: object) -> Any:
        if isinstance(dataloader, ManagedLoader) and isinstance(dataloader.batch_sampler, EvaluationBatchSampler):
            return [dataloader.batch_sampler.samples(batch) for batch in range(len(dataloader.batch_sampler))]
        return super()._get_batch_indices(dataloader)


def _with_last_batch(dataloader: object, *arguments: Any, **settings: Any) -> object:
    """Returns a copy of the user's loader that keeps the last batch; the strategy then sets the order of samples.

    Lightning (2.6) creates a new DataLoader for this, which fails if the batch size is a positional argument.
    """
    if not isinstance(dataloader, DataLoader) or type(dataloader.batch_sampler) is not BatchSampler:
        return dataloader
    loader, batch_sampler = copy.copy(dataloader), dataloader.batch_sampler
    complete_sampler = BatchSampler(batch_sampler.sampler, batch_sampler.batch_size, drop_last=False)
    vars(loader).update(batch_sampler=complete_sampler, drop_last=False)
    return loader
