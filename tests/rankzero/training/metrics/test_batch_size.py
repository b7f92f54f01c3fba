from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.data import extract_batch_size

from rankzero.training.metrics.batch_size import batch_size


@dataclass
class Batch:
    images: object
    labels: object = None


class Broken:
    def __iter__(self):
        raise TypeError("not iterable")


CYCLIC = []
CYCLIC.append(CYCLIC)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.rand(5, 2), 5),
        (torch.tensor(1.0), 1),
        ([torch.rand(3, 2), torch.rand(4)], 3),
        ([torch.tensor(1.0), torch.zeros(4)], 1),
        ([[torch.zeros(6)], torch.zeros(4)], 6),
        ((["a", "b"], torch.zeros(2, 3)), 2),
        ({"a": "text", "b": [torch.rand(6)]}, 6),
        ({1: (None, torch.rand(2))}, 2),
        (Batch(torch.rand(7, 1)), 7),
    ],
)
def test_the_size_is_that_of_lightning(batch, size):
    assert batch_size(batch) == extract_batch_size(batch) == size


def test_neither_the_elements_of_an_array_nor_those_of_an_iterator_are_read():
    assert batch_size(Batch(np.zeros((8, 3, 1000, 1000)))) == 8
    numbers = iter([torch.rand(3)])
    assert batch_size({"a": numbers}) is None and len(next(numbers)) == 3


@pytest.mark.parametrize(
    "batch", [None, "text", ["a", "b"], Broken(), [Broken()], list(range(10**6)), [], (), object(), CYCLIC]
)
def test_a_batch_without_tensors_or_one_that_contains_itself_has_no_size(batch):
    assert batch_size(batch) is None
