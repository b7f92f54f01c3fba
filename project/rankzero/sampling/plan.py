"""Puts the run's own order of samples into whatever DataLoader a data module returns."""

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
    """How the samples of a run are ordered, batched and shared among its ranks.

    Args:
        rank: This process among all.
        world_size: Processes in all.
        seed: Of the order of training samples.
        batch_size: Samples a batch on each rank, if the run says.
        global_batch_size: Samples an optimiser step over all ranks, if the run says.
        data_batch_size: Samples a batch on each rank as `--data.batch_size` has it, which a loader may or may not use.
        micro_batches: Batches an optimiser step, as `--trainer.accumulate_grad_batches` has it.
        max_device_batch_size: The largest batch that a device can hold, if the run says.
        accept_changed_data: Whether a run is carried on with other data than it began with.

    Attributes:
        start: Where the run is carried on, for each training loader; where it does not say, at the epoch's beginning.
        kept_data: Of what data the run was, where it is carried on; see `fingerprint`.
        kept_sizes: Its global batch sizes, one for each loader, where it keeps them.
        training: The orders of the training samples, one for each loader whose order is ours.
        data: The fingerprint of the training data.
        evaluated: The orders of the evaluation loaders, but for those whose order is not ours.
        unmanaged_loaders: Training loaders beside them whose order is somebody else's.
        loads_training: Whether training loaders are being set up; None where the loop does not say.
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
        """The order that sets the length of an epoch; None where the order is somebody else's."""
        return max(self.training, key=len, default=None)

    @property
    def only_order(self) -> ElasticBatchSampler | None:
        """The order of the only training loader there is; None where there are several, or it is not ours."""
        return self.training[0] if len(self.training) + self.unmanaged_loaders == 1 and self.training else None

    def wrap(
        self,
        loader: object,
        training: bool,
        broadcast: Callable[[Any], Any] = lambda value: value,
        padded_for: str | None = None,
    ) -> object:
        """Returns a loader that reads in the run's order, or the same one where its order is the user's own.

        Args:
            loader: What a data module returned.
            training: Whether it is a training loader.
            broadcast: Sends an object from rank zero to all; all ranks call it.
            padded_for: What cannot do without a sample on every rank, if anything.

        Raises:
            RequestError: A batch would be larger than the data, or the data has changed.
        """
        if isinstance(loader, ManagedLoader):  # what `trainer.train_dataloader` returned
            loader = loader.users_loader
        if training and self.training and self.training[0].begun:  # Lightning asks for the loaders anew
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
        """Has every rank read a sample in every step, for what cannot do without one."""
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
        """Raises a RequestError where a run is carried on with other data than it began with."""
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
        """Where the next loader begins."""
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
        """Samples a training step.

        Raises:
            RequestError: It was asked for, and is more than there are.
        """
        ranks, batches = self.world_size, self.micro_batches
        number = len(self.training)
        # A finder, or the user's code, may choose another size for a later epoch.
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
                return size * ranks * batches  # a user's own loader may well hold fewer samples than a batch
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
