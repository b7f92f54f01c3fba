"""The tutorial's loop with Lightning Fabric or Accelerate, as their documentation writes it; prints seconds per step.

python benchmarks/by_hand/wrappers.py --with fabric --epochs 3
python benchmarks/by_hand/wrappers.py --with accelerate --epochs 3      # needs `pip install accelerate`
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def main():
    """Trains."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--with", dest="wrapper", choices=("fabric", "accelerate"), required=True)
    flags.add_argument("--count", type=int, default=2048)
    flags.add_argument("--batch_size", type=int, default=32)
    flags.add_argument("--epochs", type=int, default=2)
    arguments = flags.parse_args()
    data = TensorDataset(torch.rand(arguments.count, 20), torch.rand(arguments.count, 1))
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if arguments.wrapper == "fabric":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader, backward = fabric.setup_dataloaders(loader), fabric.backward
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    for epoch in range(arguments.epochs):
        if epoch == 1:
            started = time.perf_counter()
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            backward(loss)
            optimizer.step()
    print(json.dumps((time.perf_counter() - started) / (arguments.epochs - 1) / len(loader)))


if __name__ == "__main__":
    main()
