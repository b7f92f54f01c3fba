"""Well-tuned hand-written loop: batches gathered from tensors, the tutorial's model, Rankzero's optimizer and schedule.

python benchmarks/by_hand/tuned.py --epochs 3
torchrun --standalone --nproc-per-node 2 benchmarks/by_hand/tuned.py --epochs 3
"""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    """Trains, and prints the mean seconds per step after the first epoch, as JSON."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--count", type=int, default=2048)
    flags.add_argument("--batch_size", type=int, default=32)
    flags.add_argument("--epochs", type=int, default=2)
    flags.add_argument("--plain", action="store_true", help="SGD without momentum, weight decay and schedule")
    arguments = flags.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = torch.nn.Linear(20, 1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    inputs, targets = torch.rand(arguments.count, 20), torch.rand(arguments.count, 1)
    steps = arguments.count // (arguments.batch_size * world)
    extras = {} if arguments.plain else {"momentum": 0.9, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **extras)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * arguments.epochs)
    for epoch in range(arguments.epochs):
        if epoch == 1:
            started = time.perf_counter()
        order = torch.randperm(arguments.count, generator=torch.Generator().manual_seed(epoch))[rank::world]
        for indices in order.split(arguments.batch_size):
            loss = F.mse_loss(model(inputs[indices]), targets[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not arguments.plain:
                schedule.step()
    seconds = (time.perf_counter() - started) / (arguments.epochs - 1) / steps
    if rank == 0:
        print(json.dumps(seconds))
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
