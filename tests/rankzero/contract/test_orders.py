"""Compares the order of the training samples with stock Lightning's."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from contract import compare, loader, rows_from
from stock import Unsized

DATA = TensorDataset(rows_from(12))
ORDER = dict.fromkeys(["rows", "weights"], "`shuffle=True`")


def seeded(sampler, *arguments):
    return sampler(*arguments, generator=torch.Generator().manual_seed(3))


CASES = {
    "RandomSampler with a generator": (lambda: loader(sampler=seeded(RandomSampler, range(12))), ORDER),
    "WeightedRandomSampler": (lambda: loader(sampler=seeded(WeightedRandomSampler, torch.arange(12.0), 8)), {}),
    "DistributedSampler": (lambda: DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 1, 0)), ORDER),
    "stream": (lambda: DataLoader(Unsized(DATA), 2), {}),
    "shuffle": (lambda: loader(shuffle=True), ORDER),
}


def train(script, make_loader):
    torch.manual_seed(7)
    trainer, net = script.trainer(), script.net()
    trainer.fit(net, make_loader(), loader(8))
    script.note(rows=[seen[2] for seen in net.seen if seen[0] == "train"], weights=net.state_dict())


@pytest.mark.parametrize(("make_loader", "differs"), CASES.values(), ids=CASES)
def test_the_order_of_the_samples_is_that_of_lightning(tmp_path, make_loader, differs):
    compare(train, tmp_path, make_loader, differs=differs)
