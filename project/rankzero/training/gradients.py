"""Averages gradients over ranks where DistributedDataParallel cannot: in steps without a backward pass on some rank."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

BUCKET_BYTES = 25 * 2**20
"""Size of the buffers that are averaged at a time; the default of DistributedDataParallel."""


MISSING, DENSE, SPARSE = 0, 1, 2
"""Kinds of gradients; the highest kind among the ranks is used on all ranks."""


def average_gradients(parameters: Iterable[Parameter], world_size: int) -> None:
    """Replaces each gradient with its mean over ranks; a missing gradient counts as 0. All ranks must call.

    A gradient that is missing on every rank stays missing, so the optimizer skips the parameter as it would in one
    process. A gradient that is sparse on some rank becomes sparse on all ranks, without the rows that are 0.

    Args:
        parameters: The model's parameters, in the same order on every rank.
        world_size: Number of processes.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    kinds = torch.tensor([_kind_of_gradient(parameter) for parameter in trained], dtype=torch.int32)
    kinds = kinds.to(trained[0].device)
    torch.distributed.all_reduce(kinds, torch.distributed.ReduceOp.MAX)
    kind_of = dict(zip(trained, kinds.tolist(), strict=True))
    used = [parameter for parameter in trained if kind_of[parameter] != MISSING]
    for bucket in _buckets(used):
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense() for parameter in bucket
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat /= world_size
        torch.distributed.all_reduce(flat)
        for parameter, mean in zip(bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True):
            _set_gradient(parameter, mean.view_as(parameter), is_sparse=kind_of[parameter] == SPARSE)


def _kind_of_gradient(parameter: Parameter) -> int:
    if parameter.grad is None:
        return MISSING
    return SPARSE if parameter.grad.is_sparse else DENSE


def _set_gradient(parameter: Parameter, mean: Tensor, is_sparse: bool) -> None:
    if is_sparse:
        parameter.grad = mean.to_sparse(1)  # one index per row, as in the gradient of an Embedding
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(mean)


def _buckets(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Groups consecutive parameters of one dtype and device into buckets of about `BUCKET_BYTES`."""
    bucket: list[Parameter] = []
    for parameter in parameters:
        size = sum(member.numel() * member.element_size() for member in bucket)
        if bucket and (_dtype_and_device(parameter) != _dtype_and_device(bucket[0]) or size >= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _dtype_and_device(parameter: Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
