import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from rankzero.sampling.fingerprint import changes, fingerprint

ROWS = torch.arange(3000.0).view(1000, 3)


class Container(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __getitem__(self, index):
        raise AssertionError("no sample is to be read")


def changed(rows, index):
    rows = rows.clone()
    rows[index] += 1
    return rows


def nested(rows, part=(1, 2)):
    return ConcatDataset([Subset(TensorDataset(rows), part), TensorDataset(rows)])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((TensorDataset(ROWS), TensorDataset(changed(ROWS, index))) for index in (0, 999)),
        (TensorDataset(ROWS), TensorDataset(ROWS.double())),
        (nested(ROWS), nested(ROWS, (1, 3))),
        (nested(ROWS), nested(changed(ROWS, 0))),
        *(
            (Container(content=first), Container(content=second))
            for first, second in [
                (np.arange(9), np.arange(9)[::-1]),
                ([("cat.png", 0), ("dog.png", 1)], [("cat.png", 0), ("dog.png", 2)]),
                ([Path("a/cat.png")], [Path("a/cow.png")]),
                ({"a": 1}, {"a": 2}),
                ([1.5, True, None], [1.5, True]),
                (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
            ]
        ),
    ],
)
def test_the_fingerprint_depends_on_the_content_of_containers_arrays_and_tensors_also_if_nested(first, second):
    assert fingerprint(first, 1) == fingerprint(copy.deepcopy(first), 1) != fingerprint(second, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/job/1/data", "/job/2/data"),
        ([Path("/job/1/cat.png")], [Path("/job/2/cat.png")]),
        (1.25, 2.5),
        (object(), object()),
        ([object()], [object()]),
    ],
)
def test_folders_single_numbers_and_unknown_objects_do_not_change_the_fingerprint(first, second):
    assert not changes(*(fingerprint(Container(content=content), 1) for content in (first, second)))


def test_changes_between_fingerprints_are_described():
    previous, current = fingerprint(TensorDataset(ROWS), 1000), fingerprint(Container(tensors=(ROWS, ROWS)), 1001)
    assert changes(previous, previous) == []
    text = "\n".join(changes(previous, current))
    assert "samples: was 1,000, is 1,001" in text and "class: was TensorDataset, is Container" in text
    assert "tensors: was tuple of 1" in text
