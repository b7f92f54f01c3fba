"""Shortest script that ends a first step: it imports what a trainer for images imports, and has no trainer."""

import torch
import torchvision  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
loader = DataLoader(data, batch_size=32, shuffle=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
network = torch.nn.Linear(20, 1).to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(network(inputs.to(device)), targets.to(device)).backward()
    optimizer.step()
    print("first step done", flush=True)
