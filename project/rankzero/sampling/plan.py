"""Replaces the order of samples in the DataLoaders of a data module with the run's order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import ElasticBatchSampler, Position
from rankzero.sampling.evaluation_sampler import EvaluationBatchSampler
from rankzero.sampling.fingerprint import changes, fingerprint
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.workers import IgnoreStopSignals


@dataclass
class SamplingPlan:
    """Plan of how a run's samples are ordered, batched and shared among its ranks.

    Args:
        rank: Rank of this process.
        world_size: Number of processes.
        seed: Seed of the order and of the samples' random numbers.
        batch_size: `--batch_size`: samples per batch on each rank, if given.
        global_batch_size: `--global_batch_size`: samples per optimizer step over all ranks, if given.
        data_batch_size: `--data.batch_size`: samples per batch on each rank, if given. A loader may use another size.
        micro_batches: `--trainer.accumulate_grad_batches`: batches per optimizer step.
        max_device_batch_size: Largest batch per device; None for no limit.
        accept_changed_data: Whether a run may resume with changed data.

    Attributes:
        start: Start positions of a resumed run's training loaders. Further loaders start at the epoch's beginning.
        kept_data: Fingerprint of the checkpoint's training data, see `fingerprint`; None after the check.
        kept_sizes: Global batch sizes that a resumed run keeps, one per training loader.
        training: Orders of the training loaders that Rankzero manages.
        data: Fingerprint of the training data.
        evaluated: Orders of the evaluation loaders that Rankzero manages.
        unmanaged_loaders: Number of training loaders whose order Rankzero does not manage.
        loads_training: Whether training loaders are being set up; None if the loop does not specify it.
        is_uneven: Whether some rank evaluates more samples than another.
    """

    rank: int = 0
    world_size: int = 1
    seed: int = 0
    batch_size: int | None = None
    global_batch_size: int | None = None
    data_batch_size: int | None = None
    micro_batches: int = 1
    max_device_batch_size: int | None = None
    accept_changed_data: bool = False
    start: list[Position] = field(default_factory=list, init=False)
    kept_data: Mapping[str, str] | None = field(default=None, init=False)
    kept_sizes: list[int] = field(default_factory=list, init=False)
    training: list[ElasticBatchSampler] = field(default_factory=list, init=False)
    data: dict[str, str] = field(default_factory=dict, init=False)
    evaluated: list[EvaluationBatchSampler] = field(default_factory=list, init=False)
    unmanaged_loaders: int = field(default=0, init=False)
    loads_training: bool | None = field(default=None, init=False)
    is_uneven: bool = field(default=False, init=False)
    _loader_sizes: dict[int, int | None] = field(default_factory=dict, init=False)

    @property
    def order(self) -> ElasticBatchSampler | None:
        """The longest training order, which sets the epoch's length; None if Rankzero manages no training loader."""
        return max(self.training, key=len, default=None)

    @property
    def only_order(self) -> ElasticBatchSampler | None:
        """The order of the only training loader; None if there are several, or if Rankzero does not manage it."""
        return self.training[0] if len(self.training) + self.unmanaged_loaders == 1 and self.training else None

    def wrap(
        self,
        loader: object,
        training: bool,
        broadcast: Callable[[Any], Any] = lambda value: value,
        padded_for: str | None = None,
    ) -> object:
        """Returns a loader that reads in the run's order, or `loader` itself if the user's code defines another order.

        Args:
            loader: Loader that a data module returned.
            training: Whether `loader` is a training loader.
            broadcast: Sends an object from rank zero to all ranks. All ranks must call.
            padded_for: Name of the feature that needs a sample on every rank, if any.

        Raises:
            RequestError: A batch would be larger than the data set, the data has changed since the checkpoint, or
                several training loaders would have different numbers of micro-batches.
        """
        if isinstance(loader, ManagedLoader):  # returned by `trainer.train_dataloader`
            loader = loader.users_loader
        if training and self.training and self.training[0].begun:  # Lightning reloads the loaders
            self.training, self.unmanaged_loaders = [], 0
        reason = _not_ours(loader)
        if reason:
            if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, IgnoreStopSignals):
                loader.worker_init_fn = IgnoreStopSignals(loader.worker_init_fn)
            if training:
                self.unmanaged_loaders += 1
                self._pad(padded_for)
            rank_zero_warn(
                f"rankzero: the order of the {'training' if training else 'evaluation'} samples is left to {reason}: "
                f"that every sample is used exactly once, at any number of processes, is not promised here"
            )
            return loader
        assert isinstance(loader, DataLoader)
        batches = self._train(loader) if training else self._evaluate(loader)
        if training:
            self._pad(padded_for)
        return ManagedLoader(loader, batches, broadcast)

    def _train(self, loader: "DataLoader[Any]") -> ElasticBatchSampler:
        count = len(loader.dataset)  # type: ignore[arg-type]
        if not count:
            raise RequestError("to train", "no training samples", "another --data")
        if not self.data:
            self.data = fingerprint(loader.dataset, count)
            self._check_data()
        batches = ElasticBatchSampler(
            count,
            self._global_batch_size(loader, count),
            self.rank,
            self.world_size,
            self.micro_batches,
            self.max_device_batch_size,
            shuffle=not isinstance(loader.sampler, SequentialSampler),
            seed=self.seed,
            drop_last=loader.drop_last,
            start=self._start(),
        )
        self.training.append(batches)
        if len({order.micro_batches for order in self.training}) > 1:
            raise RequestError(
                f"--max_device_batch_size {self.max_device_batch_size} for several training loaders",
                "batches of different sizes, which would not stay side by side",
                "--trainer.accumulate_grad_batches N",
            )
        return batches

    def _pad(self, padded_for: str | None) -> None:
        """Makes every rank read a sample in every step, for a feature or several loaders that need one."""
        if len(self.training) + self.unmanaged_loaders > 1:
            padded_for = "several training loaders"
        for order in self.training:
            order.padded = bool(padded_for)
        if padded_for and any(order.leaves_idle() for order in self.training):
            rank_zero_warn(
                f"rankzero: some steps have fewer samples than there are processes, and {padded_for} cannot do without "
                "a sample on each: there a sample is read once more. DataLoader(drop_last=True) leaves a short last "
                "batch out"
            )

    def _check_data(self) -> None:
        """Compares a resumed run's data with the checkpoint's; restarts the epoch if a change is accepted.

        Raises:
            RequestError: The data has changed, and the change was not accepted.
        """
        kept, self.kept_data = self.kept_data, None
        changed = changes(kept, self.data) if kept else []
        if not changed:
            return
        if not self.accept_changed_data:
            raise RequestError(
                "to carry on with this data",
                "the training data has changed, so that some samples would be repeated and others left out\n"
                + "\n".join(changed),
                "--accept_changed data to begin the epoch anew with it, or --resume never to start anew",
            )
        self.start = [Position(position.epoch) for position in self.start]

    def _start(self) -> Position | None:
        """Returns the start position of the next training loader; None for a run that does not resume."""
        if not self.start:
            return None
        return self.start[len(self.training)] if len(self.training) < len(self.start) else Position(self.start[0].epoch)

    def _evaluate(self, loader: "DataLoader[Any]") -> EvaluationBatchSampler:
        count = len(loader.dataset)  # type: ignore[arg-type]
        self.is_uneven |= count % self.world_size != 0
        size = self.batch_size or loader.batch_size or 1
        if self.global_batch_size is not None:
            size = -(-self.global_batch_size // (self.world_size * self.micro_batches))
        size = min(size, self.max_device_batch_size or size)
        order = EvaluationBatchSampler(count, size, self.rank, self.world_size, self.seed, loader.drop_last)
        self.evaluated.append(order)
        return order

    def _global_batch_size(self, loader: "DataLoader[Any]", count: int) -> int:
        """Returns the number of samples per optimizer step over all ranks.

        Raises:
            RequestError: The number was requested, and is larger than the data set.
        """
        ranks, batches = self.world_size, self.micro_batches
        number = len(self.training)
        # A batch size finder or the user's code may change the loader's batch size for a later epoch.
        same_size = self._loader_sizes.setdefault(number, loader.batch_size) == loader.batch_size
        if same_size and number < len(self.kept_sizes):
            return self.kept_sizes[number]
        if self.global_batch_size is not None:
            size, asked = self.global_batch_size, f"--global_batch_size {self.global_batch_size}"
            ranks = batches = 1
        elif self.batch_size is not None:
            size, asked = self.batch_size, f"--batch_size {self.batch_size}"
        else:
            assert loader.batch_size is not None
            size, asked = loader.batch_size, f"--data.batch_size {loader.batch_size}"
            if loader.batch_size != self.data_batch_size and not loader.drop_last:
                return size * ranks * batches  # a user's loader may have fewer samples than a batch
        total = size * ranks * batches
        if total > count:
            each = f" on each of {ranks} processes" * (ranks > 1) + f" in {batches} batches a step" * (batches > 1)
            in_all = f"{each}, {total:,} in all" if each else ""
            most = max(1, count // (ranks * batches))
            raise RequestError(
                asked + in_all, f"{count:,} training sample{'s' * (count != 1)}", f"{asked.split()[0]} {most}, or less"
            )
        return total


def _not_ours(loader: object) -> str | None:
    """Returns a description of the code that defines the loader's order; None if Rankzero can manage the order."""
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
