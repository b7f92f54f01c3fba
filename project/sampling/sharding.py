"""Puts the run's own order of samples into whatever DataLoader a data module returns."""

from dataclasses import dataclass, field

from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from project.errors import RequestError
from project.sampling.global_batches import GlobalBatches


@dataclass
class Sharding:
    """How the samples of a run are ordered, batched and shared among its ranks.

    Args:
        rank: This process among all.
        world_size: Processes in all.
        seed: Of the order of training samples.
        batch_size: Samples a step on each rank, if the run says.
        global_batch_size: Samples a step over all ranks, if the run says.
        data_batch_size: Samples a step on each rank as `--data.batch_size` has it, which a loader may or may not use.
        expected_count: Training samples that the run began with, where one is carried on.
    """

    rank: int = 0
    world_size: int = 1
    seed: int = 0
    batch_size: int | None = None
    global_batch_size: int | None = None
    data_batch_size: int | None = None
    expected_count: int | None = None
    training: GlobalBatches | None = field(default=None, init=False)
    """The order of the training samples, once the training loader is known and is ours to order."""
    evaluated: int = field(default=0, init=False)
    """Samples in the evaluation loaders that are ours to order."""

    def apply(self, loader: object, training: bool) -> object:
        """Returns the loader with its sampler replaced, or as it is where its order is the user's own.

        Args:
            loader: What a data module returned.
            training: Whether it is the training loader.

        Raises:
            RequestError: A batch would be larger than the data, or there are more ranks than samples.
        """
        kind = "training" if training else "evaluation"
        reason = self._not_ours(loader)
        if reason:
            rank_zero_warn(
                f"rankzero: the order of the {kind} samples is left to {reason}: that every sample is used exactly "
                f"once, at any number of processes, is not promised here"
            )
            return loader
        assert isinstance(loader, DataLoader)
        count = len(loader.dataset)  # type: ignore[arg-type]
        if count < self.world_size:
            raise RequestError(
                f"{self.world_size} processes",
                f"{count} {kind} sample{'s' * (count != 1)}, so that some would have none",
                f"--devices {max(1, count)}",
            )
        if training and self.expected_count not in (None, count):
            raise RequestError(
                f"to carry on with {count:,} training samples",
                f"the run began with {self.expected_count:,}; its order would repeat some and leave others out",
                "--resume never to start anew",
            )
        batches = GlobalBatches(
            count,
            self._global_batch_size(loader, count, training),
            self.rank,
            self.world_size,
            shuffle=training and not isinstance(loader.sampler, SequentialSampler),
            seed=self.seed,
            training=training,
            drop_last=loader.drop_last,
        )
        if training:
            self.training = batches
        else:
            self.evaluated += count
        arguments, keywords = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
        by_name = dict(zip(getattr(loader, "__pl_saved_arg_names", ()), arguments, strict=False))
        ours_now = {"batch_sampler": batches, "sampler": None, "shuffle": False, "batch_size": 1, "drop_last": False}
        ours: object = _reinstantiate_wrapped_cls(loader, **{**by_name, **keywords, **ours_now})
        return ours

    @staticmethod
    def _not_ours(loader: object) -> str | None:
        """Whose the order is, where it is not ours."""
        if not isinstance(loader, DataLoader):
            return f"a {type(loader).__name__}, which is no torch DataLoader"
        if isinstance(loader.dataset, IterableDataset):
            return f"the iterable dataset {type(loader.dataset).__name__}"
        if loader.batch_size is None and loader.batch_sampler is None:
            return "a loader without batches (batch_size=None)"
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            return f"the batch sampler {type(loader.batch_sampler).__name__}"
        if type(loader.sampler) is RandomSampler and not loader.sampler.replacement:
            return None if len(loader.sampler) == len(loader.dataset) else "a sampler that draws a part"  # type: ignore[arg-type]
        return None if type(loader.sampler) is SequentialSampler else f"the sampler {type(loader.sampler).__name__}"

    def _global_batch_size(self, loader: "DataLoader[object]", count: int, training: bool) -> int:
        if self.global_batch_size is not None:
            size, asked = self.global_batch_size, f"--global_batch_size {self.global_batch_size}"
            if size % self.world_size:
                raise RequestError(
                    asked,
                    f"{self.world_size} processes, among which it cannot be divided evenly",
                    f"--global_batch_size {max(1, size // self.world_size) * self.world_size}",
                )
        elif self.batch_size is not None:
            size, asked = self.batch_size * self.world_size, f"--batch_size {self.batch_size}"
        else:
            assert loader.batch_size is not None
            size, asked = loader.batch_size * self.world_size, f"--data.batch_size {loader.batch_size}"
            if loader.batch_size != self.data_batch_size and not loader.drop_last:
                return size  # a user's own loader may well hold fewer samples than a batch
        if training and size > count:
            shared = self.global_batch_size is not None or self.world_size == 1
            total = "" if shared else f" on each of {self.world_size} processes, {size:,} in all"
            most = count // self.world_size * (1 if self.global_batch_size is None else self.world_size)
            raise RequestError(asked + total, f"{count:,} training samples", f"{asked.split()[0]} {most}, or less")
        return size
