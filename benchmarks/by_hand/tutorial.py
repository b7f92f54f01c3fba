"""The PyTorch DDP tutorial's trainer; prints the mean seconds per step as JSON.

python benchmarks/by_hand/tutorial.py --epochs 3
torchrun --standalone --nproc-per-node 2 benchmarks/by_hand/tutorial.py --epochs 3
"""

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MyTrainDataset(Dataset):
    """Data set of random pairs."""

    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    """The tutorial's trainer."""

    def __init__(self, model, train_data, optimizer):
        self.train_data, self.optimizer = train_data, optimizer
        self.model = DistributedDataParallel(model) if torch.distributed.is_initialized() else model

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        if isinstance(self.train_data.sampler, DistributedSampler):
            self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        """Trains, and returns the mean seconds per step after the first epoch."""
        for epoch in range(max_epochs):
            if epoch == 1:
                started = time.perf_counter()
            self._run_epoch(epoch)
        return (time.perf_counter() - started) / (max_epochs - 1) / len(self.train_data)


def main():
    """Trains."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--count", type=int, default=2048)
    flags.add_argument("--batch_size", type=int, default=32)
    flags.add_argument("--epochs", type=int, default=2)
    flags.add_argument("--compile", action="store_true", help="compile the model, which the tutorial does not")
    arguments = flags.parse_args()
    is_distributed = "RANK" in os.environ
    if is_distributed:
        torch.distributed.init_process_group("gloo")
    dataset = MyTrainDataset(arguments.count)
    loader = DataLoader(
        dataset,
        batch_size=arguments.batch_size,
        shuffle=not is_distributed,
        sampler=DistributedSampler(dataset) if is_distributed else None,
    )
    model = torch.nn.Linear(20, 1)
    if arguments.compile:
        model = torch.compile(model)
    seconds = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3)).train(arguments.epochs)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(seconds))
    if is_distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
