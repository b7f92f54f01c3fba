"""Order that a user's sampler draws: divided among ranks, and exact in a resumed run."""

import json

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.sampling.drawn_order import DrawnOrder, draws_from
from rankzero.sampling.plan import SamplingPlan
from stock import QUIET


class Numbers(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(10**6, ()).item()])


class Buckets(torch.utils.data.Sampler):
    """Batch sampler without a base class of torch's, whose own counter a checkpoint does not contain."""

    def __init__(self, length=10):
        self.length, self.passes = length, 0

    def __iter__(self):
        self.passes += 1
        yield from ([3 * number, 3 * number + self.passes % 3] for number in torch.randperm(10).tolist())

    def __len__(self):
        return self.length


def weighted(generator=None):
    return WeightedRandomSampler(torch.arange(30.0), 22, generator=generator)


LOADERS = {
    "sampler": lambda: DataLoader(Numbers(), 4, sampler=weighted()),
    "sampler with generator": lambda: DataLoader(Numbers(), 4, sampler=weighted(torch.Generator().manual_seed(2))),
    "replacement": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), True), num_workers=1),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "list of batches": lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], [3], [4, 5, 6]]),
    "a BatchSampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 4, False)),
    "single items": lambda: DataLoader(Numbers(), batch_size=None, sampler=RandomSampler(Numbers())),
}


class EveryOther(DistributedSampler):
    """Sampler of this rank's share, as a class of the user's own; ranks may have different numbers of samples."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist()[self.rank :: self.num_replicas])

    def __len__(self):
        return len(range(self.rank, len(self.dataset), self.num_replicas))


def divided(rank, world, in_batches=False):
    sampler = EveryOther(Numbers(), world, rank)
    batches = {"batch_sampler": BatchSampler(sampler, 4, False)}
    return DataLoader(Numbers(), **(batches if in_batches else {"batch_size": 4, "sampler": sampler}))


@pytest.mark.parametrize(("world", "training", "in_batches"), [(2, True, False), (4, False, False), (3, True, True)])
def test_a_sampler_that_divides_the_samples_keeps_what_each_rank_draws(world, training, in_batches):
    loaders = [divided(rank, world, in_batches) for rank in range(world)]
    draws = [list(draws_from(loader)) for loader in loaders]
    lengths = [len(own) for own in draws]
    for rank, loader in enumerate(loaders):
        gathered = {str(lengths[rank]): lengths, str(draws[rank]): draws}
        wrapped = SamplingPlan(rank, world).wrap(
            loader, training, gather=lambda value, by=gathered: by.get(str(value), [value])
        )
        read = [list(indices) for indices in wrapped.batch_sampler]
        assert read == (draws[rank] if in_batches else [draws[rank][n : n + 4] for n in range(0, len(draws[rank]), 4)])


class Shuffled(EveryOther):
    """Draws from a generator of its own on each rank."""

    def __init__(self, rank):
        super().__init__(Numbers(), 2, rank)
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self):
        return iter(torch.randperm(len(self), generator=self.generator).tolist())


def test_each_rank_resumes_with_its_own_generator():
    def order(rank):
        return DrawnOrder(DataLoader(Numbers(), 4, sampler=Shuffled(rank)), None, lambda value: [value])

    def draws(orders, epoch):
        for drawn in orders:
            drawn.draw(15, 0, epoch, 0)
        return [drawn.state()["draws"].tolist() for drawn in orders]

    orders, resumed = ([order(rank) for rank in range(2)] for _ in range(2))
    draws(orders, 0)
    saved = {**orders[0].state(), "generators": [drawn.state()["generators"][0] for drawn in orders]}
    for rank, drawn in enumerate(resumed):
        drawn.load_state(saved, rank)
    (first, second), expected = draws(resumed, 1), draws(orders, 1)
    assert [first, second] == expected and first != second


def read(world, loader, training=True, **settings):
    """Returns the drawn samples and the samples that each rank reads."""
    sent, samples = [], []
    for rank in range(world):
        broadcast = (lambda draws: sent.append(draws) or draws) if rank == 0 else (lambda draws: sent[0])
        wrapped = SamplingPlan(rank, world, **settings).wrap(loader(), training, broadcast)
        batches = [list(indices) for indices in wrapped.batch_sampler]
        assert len(wrapped) == len(batches)
        samples.append([sample for batch in batches for sample in batch])
    return [sample for draw in sent[0] for sample in (draw if isinstance(draw, list) else [draw])], samples


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_the_draws_of_rank_zero_are_divided_among_the_ranks(name, world, training):
    drawn, samples = read(world, LOADERS[name], training)
    assert sorted(sample for rank in samples for sample in rank) == sorted(drawn) and len(drawn) > 5
    assert max(map(len, samples)) < len(drawn)
    if "generator" not in name:
        assert (read(world, LOADERS[name], training, seed=1)[0] == drawn) == (name == "list of batches")


class Reader(BoringModel):
    """Model that records what it reads."""

    def __init__(self):
        super().__init__()
        self.read, self.positions = [], []

    def training_step(self, batch, batch_idx):
        self.read.append(batch.flatten().tolist())
        self.positions.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(torch.ones(1, 32)).sum()


def fit(make, name, **settings):
    trainer, model = Trainer(name=name, seed=1, limit_val_batches=0, **{**QUIET, **settings}), Reader()
    trainer.fit(model, make())
    return model.read, trainer


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "list of batches"])
def test_a_run_that_resumes_reads_the_same_as_an_uninterrupted_one(script_folder, name):
    """After a stop within an epoch; random numbers of two draws of one sample differ."""
    make = LOADERS[name]
    whole, trainer = fit(make, "whole", max_epochs=3)
    stop = trainer.global_step // 3 + 2
    (first, stopped), (second, finished) = fit(make, "x", max_steps=stop), fit(make, "x", max_epochs=3)
    resumed = first + second
    assert stopped.model.positions + finished.model.positions == trainer.model.positions
    if name == "batch sampler":  # of later epochs, a checkpoint does not know the sampler's own state
        whole, resumed = whole[: 2 * len(make())], resumed[: 2 * len(make())]
    assert resumed == whole
    draws = [tuple(batch[start : start + 2]) for batch in whole for start in range(0, len(batch), 2)]
    assert len(set(draws)) == len(draws)
    summary = json.loads((script_folder / "runs/x/summary.json").read_text())
    assert summary["samples"] == len(draws) or name in ("batch sampler", "single items")


@pytest.mark.parametrize(
    ("loader", "settings", "message"),
    [
        (DataLoader(Numbers(), 4, sampler=iter(range(9))), {"world_size": 2}, "has no length"),
        (LOADERS["batch sampler"](), {"batch_size": 4}, "batches of Buckets, whose size the sampler decides"),
        (DataLoader(Numbers(), batch_sampler=Buckets(11)), {}, "11 batches of Buckets, its length at the start"),
    ],
)
def test_what_cannot_be_divided_or_is_contradictory_is_refused(loader, settings, message):
    with pytest.raises(RequestError, match=message):
        list(SamplingPlan(**settings).wrap(loader, True))


@pytest.mark.filterwarnings("ignore:.*decides the order of")
def test_a_sampler_that_divides_the_samples_itself_is_left_unchanged():
    loader = LOADERS["sampler"]()
    assert SamplingPlan(0, 2, divides_samplers=False).wrap(loader, training=True) is loader
    assert SamplingPlan().wrap(loader, training=False) is loader  # an evaluation on one process
