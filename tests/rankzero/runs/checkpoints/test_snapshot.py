"""Copies of a state in memory."""

import torch

from rankzero.runs.checkpoints.snapshot import Snapshots


class MadeOnPickling:
    """Creates its tensor only when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return torch.clone, (torch.full((1000,), self.value),)


def test_memory_is_reused_for_a_copy_of_the_same_size_but_not_within_a_copy():
    snapshots = Snapshots()
    addresses = {snapshots.take({"w": torch.zeros(1000)})["w"].data_ptr() for _ in range(5)}
    assert len(addresses) == 1
    first, second = (tensor.data_ptr() for tensor in snapshots.take([torch.ones(1000), torch.ones(1000)]))
    assert first != second
    copies = Snapshots().take([MadeOnPickling(float(value)) for value in range(50)])
    assert [copy[0].item() for copy in copies] == list(range(50))
