"""A copy of a state as it is at one moment."""

import torch

from rankzero.runs.checkpoints.snapshot import Snapshots


def test_a_copy_stays_as_the_state_was_and_the_next_one_is_as_it_is():
    snapshots, weights = Snapshots(), torch.zeros(5)
    first = snapshots.take({"w": weights})
    weights.fill_(1)
    assert first["w"].sum() == 0
    second = snapshots.take({"w": weights})
    weights.fill_(2)
    assert second["w"].sum() == 5


def test_memory_is_used_again_where_it_fits():
    snapshots = Snapshots()
    places = {snapshots.take({"w": torch.zeros(1000)})["w"].data_ptr() for _ in range(5)}
    assert len(places) == 1
    one, other = (tensor.data_ptr() for tensor in snapshots.take([torch.ones(1000), torch.ones(1000)]))
    assert one != other


class Made:
    """Makes its tensor when it is pickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return torch.clone, (torch.full((1000,), self.value),)


def test_tensors_that_are_made_on_the_way_stay_apart():
    copies = Snapshots().take([Made(float(value)) for value in range(50)])
    assert [copy[0].item() for copy in copies] == list(range(50))


def test_what_is_no_tensor_is_copied_too():
    state = {"list": [1, {"x": (2,)}], "dtype": torch.float16, "shape": torch.Size([2])}
    copy = Snapshots().take(state)
    state["list"][1]["x"] = None
    assert copy == {"list": [1, {"x": (2,)}], "dtype": torch.float16, "shape": torch.Size([2])}
