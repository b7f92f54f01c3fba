"""Copies of a state in memory."""

import torch

from rankzero.runs.checkpoints.snapshot import Snapshots


def test_a_copy_does_not_change_with_the_state_and_the_next_copy_is_current():
    snapshots, weights = Snapshots(), torch.zeros(5)
    state = {"w": weights, "list": [1, {"x": (2,)}], "dtype": torch.float16, "shape": torch.Size([2])}
    first = snapshots.take(state)
    weights.fill_(1)
    state["list"][1]["x"] = None
    assert first.pop("w").sum() == 0
    assert first == {"list": [1, {"x": (2,)}], "dtype": torch.float16, "shape": torch.Size([2])}
    second = snapshots.take(state)
    weights.fill_(2)
    assert second["w"].sum() == 5 and second["list"] == [1, {"x": None}]


def test_memory_is_reused_for_a_copy_of_the_same_size():
    snapshots = Snapshots()
    addresses = {snapshots.take({"w": torch.zeros(1000)})["w"].data_ptr() for _ in range(5)}
    assert len(addresses) == 1
    first, second = (tensor.data_ptr() for tensor in snapshots.take([torch.ones(1000), torch.ones(1000)]))
    assert first != second


class MadeOnPickling:
    """Creates its tensor only when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return torch.clone, (torch.full((1000,), self.value),)


def test_tensors_created_during_pickling_do_not_share_memory():
    copies = Snapshots().take([MadeOnPickling(float(value)) for value in range(50)])
    assert [copy[0].item() for copy in copies] == list(range(50))
