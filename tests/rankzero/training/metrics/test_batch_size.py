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


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(5, 2),
        torch.tensor(1.0),
        [torch.rand(3, 2), torch.rand(4)],
        {"a": "text", "b": [torch.rand(6)]},
        Batch(torch.rand(7, 1)),
        {1: (None, torch.rand(2))},
    ],
)
def test_the_size_is_that_of_lightning(batch):
    assert batch_size(batch) == extract_batch_size(batch)


def test_the_elements_of_an_array_are_not_read():
    assert batch_size(Batch(np.zeros((8, 3, 1000, 1000)))) == 8


def test_an_iterator_is_not_consumed():
    numbers = iter([torch.rand(3)])
    assert batch_size({"a": numbers}) is None and len(next(numbers)) == 3


@pytest.mark.parametrize("batch", [None, "text", ["a", "b"], Broken(), [Broken()], list(range(10**6)), []])
def test_a_batch_without_tensors_has_no_size(batch):
    assert batch_size(batch) is None


def test_a_batch_that_contains_itself_has_no_size():
    batch = []
    batch.append(batch)
    assert batch_size(batch) is None
