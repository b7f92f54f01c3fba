"""Hand-written loop that trains a ResNet-18 on noise in the shape of CIFAR-10, with or without torchrun.

torchrun --standalone --nproc-per-node 2 benchmarks/by_hand/resnet.py --well_tuned

Prints the mean seconds per step without the first step, as JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from lightning_modules.resnet import ResidualNetwork

POOL, SHAPE, CLASSES = 512, (3, 32, 32), 10
LOG_EVERY = 10


def tutorial(network: nn.Module, world: int) -> nn.Module:
    """Prepares a network as tutorials do."""
    return DistributedDataParallel(network) if world > 1 else network


def well_tuned(network: nn.Module, world: int) -> nn.Module:
    """Prepares a network for speed on a CPU: channels_last, DDP with a static graph and no copy of the gradients."""
    network = network.to(memory_format=torch.channels_last)
    if world == 1:
        return network
    return DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)


def sample_by_sample(
    images: Tensor, labels: Tensor, batch_size: int, rank: int, world: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yields the batches of a DataLoader, which reads sample by sample."""
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    yield from DataLoader(data, batch_size=batch_size, sampler=sampler)


def gathered_at_once(
    images: Tensor, labels: Tensor, batch_size: int, rank: int, world: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yields batches, each read with one gather."""
    for indices in torch.randperm(len(images))[rank::world].split(batch_size):
        batch = images.index_select(0, indices)
        yield batch.contiguous(memory_format=torch.channels_last), labels.index_select(0, indices)


def train(tuned: bool, steps: int, batch_size: int, compiled: bool) -> float:
    """Trains for `steps` steps, and returns the mean seconds per step without the first."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    network: nn.Module = ResidualNetwork(18, width=64, stem="small", channels=SHAPE[0], classes=CLASSES)
    network = (well_tuned if tuned else tutorial)(network, world)
    if compiled:
        network.compile()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    count = steps * batch_size * world
    indices = torch.arange(count) % POOL
    images, labels = torch.randn(POOL, *SHAPE)[indices], torch.randint(CLASSES, (POOL,))[indices]

    read_batches = gathered_at_once if tuned else sample_by_sample
    uses_bf16 = tuned and "avx512_bf16" in Path("/proc/cpuinfo").read_text()  # otherwise emulated, 50 times slower
    for step, (inputs, targets) in enumerate(read_batches(images, labels, batch_size, rank, world)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if uses_bf16 else nullcontext():
            loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == 0:
            started = time.perf_counter()
        if step % LOG_EVERY == LOG_EVERY - 1 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}")
    return (time.perf_counter() - started) / (steps - 1)


def main() -> None:
    """Trains, and prints the seconds per step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--well_tuned", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128, help="of each process")
    arguments = parser.parse_args()
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_distributed:
        torch.distributed.init_process_group("gloo")
    seconds = train(arguments.well_tuned, arguments.steps, arguments.batch_size, arguments.compiled)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(seconds))
    if is_distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
