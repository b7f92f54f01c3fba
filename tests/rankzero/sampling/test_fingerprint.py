import copy
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from rankzero.sampling.fingerprint import changes, check_same_data, fingerprint
from running import on_each_rank

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
        *(("/job/1/data", "/job/2/data"), ([Path("/job/1/cat.png")], [Path("/job/2/cat.png")])),
        *((1.25, 2.5), (object(), object()), ([object()], [object()])),
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


def refusals(first, second, counts=(9, 9), sizes=(4, 4), accepts=False):
    """Compares the data of two ranks; returns what each of them raises."""
    values, barrier = {}, threading.Barrier(2, timeout=10)

    def work(rank):
        def gather(value):
            values[rank] = value
            barrier.wait()
            gathered = [values[0], values[1]]
            barrier.wait()
            return gathered

        properties = {"loader": "training", "samples": f"{counts[rank]:,}", "batch size": str(sizes[rank])}
        check_same_data((first, second)[rank], properties, accepts, gather)

    return on_each_rank([0, 1], work)


def test_ranks_refuse_data_that_differs_in_samples_batches_or_content_unless_content_is_accepted():
    first, second = TensorDataset(ROWS), TensorDataset(changed(ROWS, 0))
    error, same = refusals(first, second)
    host = socket.gethostname()
    assert str(error) == str(same) and "tensors: tuple of 1, " in error.found and f"on rank 1 ({host})" in error.found
    assert "--accept_changed data" in error.instead
    for differs, line in [({"counts": (9, 1008)}, "samples: 9 on"), ({"sizes": (4, 5)}, "batch size: 4 on")]:
        error, _ = refusals(nested(ROWS), nested(ROWS), **differs)
        assert error.found.splitlines()[1].startswith(line) and "--accept_changed" not in error.instead
    assert refusals(nested(ROWS), nested(changed(ROWS, 0)), accepts=True) == [None, None]
    for samples, others in (([1, 2, 3], [3, 2, 1]), ({0: 1, 1: 2}, {0: 1, 1: 3})):
        error, _ = refusals(samples, others)
        assert error.found.splitlines()[1].startswith(f"content: {type(samples).__name__} of {len(samples)}, ")


def test_the_content_of_a_data_set_is_compared_once_since_it_may_cache_samples_of_its_rank():
    ranks = [Container(rows=ROWS, cache={}) for _ in range(2)]
    assert refusals(*ranks) == [None, None]
    ranks[0].cache[0] = ROWS[0]
    assert refusals(*(Subset(rank, [1, 2]) for rank in ranks)) == [None, None]
    error, _ = refusals(Subset(ranks[0], [1, 2]), Subset(ranks[1], [1, 3]))
    assert "indices: list of 2, " in error.found
