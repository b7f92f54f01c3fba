import pytest
import torch
from torch import nn

from rankzero.training.ddp import average_gradients

SHAPES = {"on all ranks": (2, 3), "on rank zero": (3,), "scalar": (), "empty": (0,), "channels last": (2, 2, 2, 2)}
SHAPES |= dict.fromkeys(("on no rank", "frozen", "double", "bfloat16"), (2,))
SHAPES |= dict.fromkeys(("sparse", "sparse on rank zero"), (4, 2))
DTYPES = {"double": torch.float64, "bfloat16": torch.bfloat16}


def gradient(name, rank):
    """Returns a rank's gradient, whose values differ between ranks and have exact sums."""
    values = torch.arange(1.0, 1 + torch.Size(SHAPES[name]).numel()).reshape(SHAPES[name]) * 2 ** (2 * rank)
    if name.startswith("sparse"):  # two values for the same row
        return torch.sparse_coo_tensor([[rank, rank]], values[:2], SHAPES[name], check_invariants=True)
    return values.to(DTYPES.get(name, torch.float32))


def has_gradient(name, rank):
    return name != "on no rank" and (not name.endswith("on rank zero") or rank == 0)


def average_many_kinds(coordinator):
    rank, world_size = coordinator.world.rank, coordinator.world.size
    parameters = {}
    for name, shape in SHAPES.items():
        layout = torch.channels_last if name == "channels last" else torch.contiguous_format
        value = torch.zeros(shape, dtype=DTYPES.get(name)).to(memory_format=layout)
        parameters[name] = nn.Parameter(value, requires_grad=name != "frozen")
        if has_gradient(name, rank):
            value = gradient(name, rank)
            parameters[name].grad = value if value.is_sparse else value.to(memory_format=layout)
    average_gradients(iter(parameters.values()), world_size)
    assert parameters["channels last"].grad.is_contiguous(memory_format=torch.channels_last)
    averaged = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return {name: (value.to_dense().tolist(), str(value.dtype), value.is_sparse) for name, value in averaged.items()}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_trained_parameters_are_averaged_over_ranks(on_ranks, world_size):
    for rank, averaged in enumerate(on_ranks(average_many_kinds, world_size)):
        assert averaged.keys() == SHAPES.keys() - {"on no rank"}
        for name, (values, dtype, is_sparse) in averaged.items():
            dense = [gradient(name, other).to_dense() for other in range(world_size) if has_gradient(name, other)]
            expected = gradient(name, rank) if name == "frozen" else sum(dense) / world_size
            tolerance = 1e-2 if name == "bfloat16" else 1e-6
            assert torch.allclose(torch.tensor(values).double(), expected.double(), rtol=tolerance, atol=0), name
            assert dtype == str(expected.dtype) and is_sparse == name.startswith("sparse")


def test_sparse_adam_accepts_averaged_sparse_gradients(request):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    request.addfinalizer(torch.distributed.destroy_process_group)
    table = nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([3, 1, 3])).sum().backward()
    without_gradient = nn.Parameter(torch.zeros(1))
    for parameter in (table.weight, without_gradient):
        average_gradients([parameter], 1)
    torch.optim.SparseAdam([table.weight], lr=0.5).step()
    changed = (table.weight.detach() != before).all(1)
    assert changed.tolist() == [False, True, False, True, False] and without_gradient.grad is None


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.zeros(1), requires_grad=False)]])
def test_no_collective_runs_without_trained_parameters(parameters):
    average_gradients(parameters, 2)  # a collective would fail, because there is no process group
