"""Order of samples that a user's sampler draws at the start of each epoch."""

from collections.abc import Callable, Sized
from itertools import islice, zip_longest
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from rankzero.messages import RequestError
from rankzero.sampling import generators
from rankzero.sampling.permutation import Indices, Positions, draw_key

BATCH = 2**20
"""Factor that keeps the random numbers of different batches apart; more samples than a batch has."""


class DrawnOrder:
    """What a user's sampler draws in an epoch: all ranks read rank zero's draws, and a resumed epoch keeps them.

    If the sampler draws this rank's share only, the epoch consists of the draws of all ranks: the first of each rank,
    then the second. So every rank reads its own draws if all have as many and every step reads as many of each.

    The global generators are seeded for the draws, so that these depend only on seed, epoch and pass. A generator of
    the sampler's own continues. If `draws_batches`, a draw is a whole batch.
    """

    def __init__(
        self, loader: "DataLoader[Any]", broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]
    ) -> None:
        self._sampler, self._broadcast, self._gather = draws_from(loader), broadcast, gather
        self._is_divided, self._is_batched = divided_by(self._sampler) > 1, loader.batch_sampler is not None
        self.draws_batches = not self._is_batched or self._sampler is loader.batch_sampler
        self._draws: list[Any] = []
        self._epoch = self._pass_index = -1
        # As in Lightning, a batch sampler of the user's receives no epoch.
        with_epoch: tuple[Any, ...] = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        self._with_epoch = {id(sampler): sampler for sampler in with_epoch if hasattr(sampler, "set_epoch")}
        inner = getattr(self._sampler, "sampler", None)  # of a batch sampler
        generator = getattr(self._sampler, "generator", None) or getattr(inner, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._kept: dict[str, Any] | None = None
        self._length = sum(gather(len(self._sampler))) if self._is_divided else len(self._sampler)

    def __len__(self) -> int:
        return self._length

    @property
    def name(self) -> str:
        """What a draw is, in the plural: `draws of WeightedRandomSampler`."""
        return f"{'batches' if self.draws_batches and self._is_batched else 'draws'} of {type(self._sampler).__name__}"

    def draw(self, count: int, seed: int, epoch: int, pass_index: int) -> None:
        """Draws the samples of an epoch, or takes those of the checkpoint. All ranks must call.

        Raises:
            RequestError: The sampler has fewer samples than its length.
        """
        self._epoch, self._pass_index = epoch, pass_index
        kept, self._kept = self._kept, None
        if kept and (kept["epoch"], kept["pass_index"]) == (epoch, pass_index):
            draws = kept["draws"]
            self._draws = draws.tolist() if isinstance(draws, torch.Tensor) else draws
            return
        for sampler in self._with_epoch.values():
            sampler.set_epoch(epoch)
        states = generators.get_states()
        generators.seed(draw_key(seed, epoch, pass_index))
        try:
            draws = [_plain(draw) for draw in islice(self._sampler, count)]
        finally:
            generators.set_states(states)
        self._draws = interleave(self._gather(draws)) if self._is_divided else self._broadcast(draws)
        if len(self._draws) < count:
            requested = f"{count:,} {self.name}, its length at the start"
            raise RequestError(requested, f"{len(self._draws):,}", "a sampler whose length does not change")

    def indices(self, positions: Positions, key: int) -> Indices:
        """Returns the samples at these positions of the epoch, at most one if a draw is a batch.

        The samples' random numbers depend on the position.
        """
        numbers = positions.tolist()
        draws = [self._draws[number] for number in numbers]
        if self.draws_batches and self._is_batched and draws:
            draws = list(draws[0])
            numbers = [numbers[0] * BATCH + sample for sample in range(len(draws))]
        return Indices(draws, key, numbers)

    def load_state(self, state: dict[str, Any] | None, rank: int) -> None:
        """Restores the `state` of a checkpoint on this rank."""
        self._kept = state
        if state and self._generator and (states := state["generators"]):
            self._generator.set_state(states[rank % len(states)])

    def state(self) -> dict[str, Any]:
        """Returns this epoch's draws, and the sampler's generator on each rank, for a resume. All ranks must call."""
        draws: Any = self._draws
        if all(isinstance(draw, int) for draw in draws):
            draws = torch.tensor(draws, dtype=torch.int64)  # a list takes longer to save
        states = self._gather(self._generator.get_state()) if self._generator else []
        return {"epoch": self._epoch, "pass_index": self._pass_index, "draws": draws, "generators": states}


def interleave(draws_of_ranks: list[list[Any]]) -> list[Any]:
    """Returns the first draw of each rank, then the second, and so on."""
    end = object()
    return [draw for draws in zip_longest(*draws_of_ranks, fillvalue=end) for draw in draws if draw is not end]


def _plain(draw: Any) -> Any:
    """Returns a draw without tensors and arrays, which a checkpoint stores."""
    if isinstance(draw, list | tuple):
        return (tuple if isinstance(draw, tuple) else list)(map(_plain, draw))
    return draw.tolist() if hasattr(draw, "tolist") else draw


def draws_from(loader: "DataLoader[Any]") -> Any:
    """Returns the sampler or batch sampler that decides the order of a loader."""
    is_plain = loader.batch_sampler is None or (type(loader.batch_sampler) is BatchSampler and loader.batch_size)
    return loader.sampler if is_plain else loader.batch_sampler


def has_run_order(loader: "DataLoader[Any]", world_size: int) -> bool:
    """Returns whether a loader reads every sample once, in order or shuffled, so that the run's order replaces its own.

    A `DistributedSampler` counts if it divides the samples among as many ranks as the run has. Its `rank` may be
    another one, such as that on a node; all ranks must decide alike.
    """
    sampler = draws_from(loader)
    if loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is DistributedSampler:
        return sampler.num_replicas == world_size
    return type(sampler) is SequentialSampler


def divided_by(sampler: Any) -> int:
    """Returns among how many ranks a `DistributedSampler`, also within a batch sampler, divides the samples; else 1."""
    sampler = sampler if isinstance(sampler, DistributedSampler) else getattr(sampler, "sampler", None)
    return sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1


def loader_properties(loader: Any, training: bool, reason: str | None) -> dict[str, str]:
    """Returns what all ranks must have in common of a loader, except the content of its data set."""
    if reason:
        return {"loader": f"{'training' if training else 'evaluation'} with {reason}"}
    sampler = draws_from(loader)
    properties = {"loader": f"{'training' if training else 'evaluation'} with a {type(sampler).__name__}"}
    samples = sampler if divided_by(sampler) == 1 and not has_run_order(loader, 1) else loader.dataset
    if isinstance(samples, Sized):
        properties["samples"] = f"{len(samples):,}"
    return properties | {"batch size": str(loader.batch_size), "drop_last": str(loader.drop_last)}
