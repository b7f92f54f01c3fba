"""Replaces the order of samples in the DataLoaders of a data module with the run's order."""

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import ElasticBatchSampler, EvaluationBatchSampler, Position
from rankzero.sampling.drawn_order import DrawnOrder, divided_by, draws_from, has_run_order, loader_properties
from rankzero.sampling.fingerprint import changes, check_same_data, fingerprint
from rankzero.sampling.loader import Collate, ManagedLoader
from rankzero.sampling.workers import PrepareWorker


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
        is_seeded: Whether the user has set the seed; otherwise a resumed run keeps its own.
        accept_changed_data: Whether a run may resume with changed data, and data may differ between ranks.
        reloads_data: Whether `reload_dataloaders_every_n_epochs` is set, so that an epoch may begin with other data.
        divides_samplers: `use_distributed_sampler`: whether the draws of a user's samplers are divided among ranks.

    Attributes:
        start_positions: Start positions of a resumed run's training loaders. Further loaders start at the epoch's
            beginning.
        kept_data: Fingerprint of the checkpoint's training data, see `fingerprint`; None after the check.
        kept_sizes: Global batch sizes that a resumed run keeps, one per training loader.
        kept_draws: States of the `DrawnOrder`s that a resumed run keeps, one per training loader.
        kept_streams: States of the `streams` that a resumed run keeps.
        training_orders: Orders of the training loaders that Rankzero manages.
        data: Fingerprint of the training data.
        evaluation_orders: Orders of the evaluation loaders that Rankzero manages.
        streams: The `Stream` of each training loader of torch's class whose order Rankzero does not manage.
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
    is_seeded: bool = True
    accept_changed_data: bool = False
    divides_samplers: bool = True
    reloads_data: bool = False
    start_positions: list[Position] = field(default_factory=list, init=False)
    kept_data: Mapping[str, str] | None = field(default=None, init=False)
    kept_sizes: list[int] = field(default_factory=list, init=False)
    kept_draws: list[Any] = field(default_factory=list, init=False)
    kept_streams: list[Any] = field(default_factory=list, init=False)
    training_orders: list[ElasticBatchSampler] = field(default_factory=list, init=False)
    streams: list[Any] = field(default_factory=list, init=False)
    data: dict[str, str] = field(default_factory=dict, init=False)
    evaluation_orders: list[EvaluationBatchSampler] = field(default_factory=list, init=False)
    unmanaged_loaders: int = field(default=0, init=False)
    loads_training: bool | None = field(default=None, init=False)
    is_uneven: bool = field(default=False, init=False)
    _loader_sizes: dict[int, int | None] = field(default_factory=dict, init=False)

    @property
    def order(self) -> ElasticBatchSampler | None:
        """The longest training order, which sets the epoch's length; None if Rankzero manages no training loader."""
        return max(self.training_orders, key=len, default=None)

    @property
    def only_order(self) -> ElasticBatchSampler | None:
        """The order of the only training loader; None if there are several, or if Rankzero does not manage it."""
        return self.order if len(self.training_orders) + self.unmanaged_loaders == 1 else None

    def forget_loaders(self) -> None:
        """Forgets the loaders of an earlier `fit`, before the loaders of the next one are wrapped."""
        self.training_orders, self.streams, self.unmanaged_loaders, self.start_positions = [], [], 0, []
        self.data, self.kept_data, self.kept_sizes, self._loader_sizes = {}, None, [], {}
        self.kept_draws, self.kept_streams = [], []

    @property
    def counted_order(self) -> ElasticBatchSampler | None:
        """The `only_order`, unless it counts batches in place of samples."""
        return self.only_order if self.only_order and not self.only_order.counts_batches else None

    def wrap(
        self,
        loader: object,
        training: bool,
        broadcast: Callable[[Any], Any] = lambda value: value,
        padded_for: str | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        stream: "Callable[[DataLoader[Any], Any], Any] | None" = None,
    ) -> object:
        """Returns a loader that reads in the run's order, or `loader` itself if the user's code defines another order.

        Raises:
            RequestError: A batch would be larger than the data set, the data differs between ranks or from the
                checkpoint's, several training loaders would have different numbers of micro-batches, or a user's
                sampler has no length.
        """
        if isinstance(loader, ManagedLoader):  # returned by `trainer.train_dataloader`
            loader = loader.user_loader
        sources = [*self.training_orders, *self.streams]
        if training and any(source.has_started for source in sources):  # Lightning reloads the loaders
            self.training_orders, self.streams, self.unmanaged_loaders, self.data = [], [], 0, {}
        reason = self._unmanaged_reason(loader, training)
        if self.world_size > 1 and gather:
            properties = loader_properties(loader, training, reason)
            check_same_data(None if reason else loader.dataset, properties, self.accept_changed_data, gather)  # type: ignore[attr-defined]
        if reason:
            if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, PrepareWorker):
                loader.worker_init_fn = PrepareWorker(loader.worker_init_fn)
                loader.collate_fn = Collate(loader.collate_fn)
            text = f"{reason} decides the order of the {'training' if training else 'evaluation'} samples: "
            text += "Rankzero does not guarantee that each sample is used exactly once"
            text += f". Each of the {self.world_size} processes must read other samples" * (self.world_size > 1)
            rank_zero_warn(f"rankzero: {text}")
            if training:
                if stream and isinstance(loader, DataLoader):
                    managed = stream(loader, self._kept_stream(loader))
                    self.streams.append(managed.stream)
                    loader = managed
                self.unmanaged_loaders += 1
                self._pad(padded_for)
            return loader
        assert isinstance(loader, DataLoader)
        gather = gather or (lambda value: [value] * self.world_size)
        drawn = None if has_run_order(loader, self.world_size) else DrawnOrder(loader, broadcast, gather)
        add_order = self._add_training_order if training else self._add_evaluation_order
        batches = add_order(loader, drawn)
        if training:
            self._pad(padded_for)
        return ManagedLoader(loader, batches, broadcast)

    def _kept_stream(self, loader: "DataLoader[Any]") -> dict[str, Any] | None:
        """Returns the state with which the next stream resumes within an epoch, or None."""
        index = len(self.streams)
        kept: dict[str, Any] | None = self.kept_streams[index] if index < len(self.kept_streams) else None
        if not kept or not kept["batches"]:
            return None
        readers = "{} processes with {} loader processes each"
        requested = readers.format(self.world_size, loader.num_workers)
        if requested == (found := readers.format(*kept["readers"])):
            return kept
        if self.accept_changed_data:
            return None
        read = f"{found} have read {kept['batches']:,} batches of epoch {kept['epoch'] + 1}"
        division = f"{type(loader.dataset).__name__} divides its own samples, so that only the same numbers can resume"
        instead = f"the same numbers, or --accept_changed data, to read the stream from its beginning, or {_NEW_RUN}"
        raise RequestError(f"to resume with {requested}", f"{read}; {division}", instead)

    def _unmanaged_reason(self, loader: object, training: bool) -> str | None:
        """Returns a description of the code that defines the loader's order; None if Rankzero can manage the order."""
        if not isinstance(loader, DataLoader):
            return f"a {type(loader).__name__} (not a torch DataLoader)"
        if isinstance(loader.dataset, IterableDataset):
            return f"the iterable dataset {type(loader.dataset).__name__}"
        if has_run_order(loader, self.world_size):
            return None
        sampler = draws_from(loader)
        name = f"the {'batch ' * (sampler is loader.batch_sampler)}sampler {type(sampler).__name__}"
        parts = divided_by(sampler)
        is_divided, can_be_divided = parts == self.world_size, parts == 1 and self.divides_samplers
        if isinstance(sampler, Sized) and (is_divided or can_be_divided):
            return name if self.world_size == 1 and not training else None
        if is_divided or not can_be_divided:
            return name
        found = "it has no length (`__len__`), so its samples cannot be divided among the processes"
        instead = "a sampler with a length, or use_distributed_sampler=False if it draws other samples on each rank"
        raise RequestError(f"{name} on {self.world_size} processes", found, instead)

    def _add_training_order(self, loader: "DataLoader[Any]", drawn: DrawnOrder | None) -> ElasticBatchSampler:
        count = len(drawn or loader.dataset)  # type: ignore[arg-type]
        if not count:
            found = "the training data set is empty"
            raise RequestError("to train", found, "another --data, or correct the train_dataloader")
        if not self.data:
            self.data = fingerprint(loader.dataset, count) | ({"order": drawn.name} if drawn else {})
            self._check_data()
        if drawn and len(self.training_orders) < len(self.kept_draws):
            drawn.load_state(self.kept_draws[len(self.training_orders)], self.rank)
        batches = ElasticBatchSampler(
            count,
            self._global_batch_size(loader, count, drawn),
            self.rank,
            self.world_size,
            self.micro_batches,
            1 if drawn and drawn.draws_batches else self.max_device_batch_size,
            shuffle=not drawn and getattr(loader.sampler, "shuffle", type(loader.sampler) is not SequentialSampler),
            seed=self.seed,
            drop_last=loader.drop_last,
            start=self._next_start_position(),
            drawn=drawn,
        )
        self.training_orders.append(batches)
        if len({order.micro_batches for order in self.training_orders}) > 1:
            asked = f"--max_device_batch_size {self.max_device_batch_size} for several training loaders"
            found = "batches of different sizes, which would not stay aligned"
            raise RequestError(asked, found, "--trainer.accumulate_grad_batches N")
        return batches

    def _pad(self, padded_for: str | None) -> None:
        """Makes every rank read a sample in every step, for a feature or several loaders that need one."""
        if len(self.training_orders) + self.unmanaged_loaders > 1:
            padded_for = "several training loaders"
        if not padded_for:
            return
        has_empty_batches = any(order.has_empty_batches() for order in self.training_orders)
        for source in (*self.training_orders, *self.streams):
            source.is_padded = True
        if has_empty_batches:
            text = "some steps have fewer samples than there are processes, but each process needs a sample for"
            effect = "in these steps some samples are read more than once"
            advice = "To avoid this, drop a short last batch with DataLoader(drop_last=True)"
            rank_zero_warn(f"rankzero: {text} {padded_for}: {effect}. {advice}")

    def _check_data(self) -> None:
        """Compares a resumed run's data with the checkpoint's; restarts the epoch if a change is accepted."""
        checkpoint_data, self.kept_data = self.kept_data, None
        differences = changes(checkpoint_data, self.data) if checkpoint_data else []
        if not differences:
            return
        is_within_epoch = any(position.samples for position in self.start_positions)
        if not (self.accept_changed_data or (self.reloads_data and not is_within_epoch)):
            effect = ", so that some samples would be repeated and others never used" if is_within_epoch else ""
            action = "restart the epoch" if is_within_epoch else "begin the next epoch"
            found = "\n".join([f"the training data has changed{effect}", *differences])
            instead = f"--accept_changed data, to {action} with the new data, or --resume never, to restart the run"
            raise RequestError("to resume with this data", found, instead)
        self.start_positions, self.kept_draws = [Position(position.epoch) for position in self.start_positions], []

    def _next_start_position(self) -> Position | None:
        """Returns the start position of the next training loader; None for a run that does not resume."""
        loader_index = len(self.training_orders)
        if loader_index < len(self.start_positions):
            return self.start_positions[loader_index]
        return Position(self.start_positions[0].epoch) if self.start_positions else None

    def _add_evaluation_order(self, loader: "DataLoader[Any]", drawn: DrawnOrder | None) -> EvaluationBatchSampler:
        count = len(drawn or loader.dataset)  # type: ignore[arg-type]
        self.is_uneven |= count % self.world_size != 0
        size = self.batch_size or loader.batch_size or 1
        if self.global_batch_size is not None:
            size = -(-self.global_batch_size // (self.world_size * self.micro_batches))
        size = 1 if drawn and drawn.draws_batches else min(size, self.max_device_batch_size or size)
        order = EvaluationBatchSampler(count, size, self.rank, self.world_size, self.seed, loader.drop_last, drawn)
        self.evaluation_orders.append(order)
        return order

    def _check_no_batch_size(self, drawn: DrawnOrder) -> None:
        """Raises a RequestError if the size of batches that the user's code decides was requested."""
        for flag in ("batch_size", "global_batch_size", "max_device_batch_size"):
            if (size := getattr(self, flag)) is not None:
                found = f"{drawn.name}, whose size the sampler decides"
                raise RequestError(f"--{flag} {size}", found, f"no --{flag}, or a DataLoader(batch_size={size})")

    def _global_batch_size(self, loader: "DataLoader[Any]", count: int, drawn: DrawnOrder | None) -> int:
        """Returns the number of samples per optimizer step over all ranks; of batches, if a draw is a batch."""
        ranks, batches = self.world_size, self.micro_batches
        loader_index = len(self.training_orders)
        # A batch size finder or the user's code may change the loader's batch size for a later epoch.
        is_same_size = self._loader_sizes.setdefault(loader_index, loader.batch_size) == loader.batch_size
        if is_same_size and loader_index < len(self.kept_sizes):
            return self.kept_sizes[loader_index]
        if drawn and drawn.draws_batches:
            self._check_no_batch_size(drawn)
            return ranks * batches
        if self.global_batch_size is not None:
            size, flag = self.global_batch_size, f"--global_batch_size {self.global_batch_size}"
            ranks = batches = 1
        elif self.batch_size is not None:
            size, flag = self.batch_size, f"--batch_size {self.batch_size}"
        else:
            assert loader.batch_size is not None
            size, flag = loader.batch_size, f"--data.batch_size {loader.batch_size}"
            if loader.batch_size != self.data_batch_size and not loader.drop_last:
                return size * ranks * batches  # a user's loader may have fewer samples than a batch
        total = size * ranks * batches
        if total > count:
            division = f" on each of {ranks} processes" * (ranks > 1) + f" in {batches} batches a step" * (batches > 1)
            details = f"{division}, {total:,} in all" if division else ""
            largest = max(1, count // (ranks * batches))
            found = f"{count:,} training sample{'s' * (count != 1)}"
            raise RequestError(flag + details, found, f"{flag.split()[0]} {largest}, or less")
        return total


_NEW_RUN = "--resume never to restart the run"


def resume_order(plan: SamplingPlan, manifest: dict[str, Any], run: str, accepts_batch_size_change: bool) -> str | None:
    """Makes a resumed run keep its global batch size, seed and data, because another order would repeat samples.

    Returns:
        A note for the user, or None.

    Raises:
        RequestError: Another order was requested and not accepted, or the checkpoint's order is invalid.
    """
    stored_order = order_in(manifest)
    if not stored_order:
        plan.start_positions = [Position(manifest["epoch"])] if manifest.get("epoch") else []
        return None
    try:
        seed = _checked_number(stored_order["seed"])
        sizes = [_checked_number(size, minimum=1) for size in stored_order["global_batch_sizes"]]
        plan.kept_data = None if stored_order["data"] is None else dict(stored_order["data"])
        plan.start_positions = [
            Position(**{name: _checked_number(value) for name, value in stored.items()})
            for stored in stored_order["positions"]
        ]
        kept_size = sizes[0]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"its stored sample order is damaged ({error!r})"
        raise RequestError("to resume from this checkpoint", found, f"another checkpoint, or {_NEW_RUN}") from None
    check_seed(plan, seed, run)
    plan.seed = seed
    if accepts_batch_size_change:
        if len(sizes) > 1:  # several loaders would get out of step, so the epoch restarts
            plan.start_positions = [Position(position.epoch) for position in plan.start_positions]
        return None
    plan.kept_sizes = sizes
    if plan.global_batch_size not in (None, kept_size):
        found = f"run {run} keeps its global batch size, {kept_size}"
        instead = f"--global_batch_size {kept_size}, or --accept_changed global_batch_size to change it, or {_NEW_RUN}"
        raise RequestError(f"--global_batch_size {plan.global_batch_size}", found, instead)
    requested_size = (plan.batch_size or 0) * plan.world_size * plan.micro_batches
    if requested_size in (0, kept_size):
        return None
    requested = f"--batch_size {plan.batch_size} would be {requested_size:,} samples a step"
    return f"{requested}; run {run} resumes with {kept_size:,}; --accept_changed global_batch_size changes it"


def order_in(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the order of samples that a checkpoint's manifest stores; empty if there is none."""
    return (manifest.get("rankzero") or {}).get("order") or {}


def check_seed(plan: SamplingPlan, seed: int | None, run: str) -> None:
    """Raises a RequestError if the user has set another seed than that of the run."""
    if plan.is_seeded and seed not in (None, plan.seed):
        found = f"run {run} keeps its seed, {seed}"
        raise RequestError(f"--seed {plan.seed}", found, f"--seed {seed}, --name ANOTHER-NAME, or {_NEW_RUN}")


def _checked_number(value: object, minimum: int = 0) -> int:
    if type(value) is not int or not minimum <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number >= {minimum}")
    return value
