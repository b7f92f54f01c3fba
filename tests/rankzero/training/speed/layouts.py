"""Prints the ResNets whose gradients differ between the layout that --fast chooses and the contiguous layout.

This is a separate program, because a bug in oneDNN can corrupt the heap.
"""

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.resnet import ResidualNetwork
from rankzero.distributed.torch_inside import onednn_supports_bf16
from rankzero.training.speed.layout import apply_layout

SHAPES = [
    *((10, width, "small", 8) for width in (1, 4, 6, 8, 12, 16)),
    *((10, width, "imagenet", 8) for width in (4, 16)),
    *((50, width, "small", 8) for width in (2, 3, 4)),
    (18, 4, "small", 8),
    (10, 6, "small", 7),
]
STEPS, BATCH, TOLERANCE = 2, 8, 1e-3


def gradients(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of all parameters."""
    network.zero_grad()
    F.cross_entropy(network(images), labels).backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def largest_difference(depth: int, width: int, stem: str, pixels: int) -> float:
    """Returns the largest difference between gradients, relative to the largest value of the same tensor."""
    torch.manual_seed(0)
    network = ResidualNetwork(depth, width, stem, channels=3, classes=10).eval()  # keeps BatchNorm constant
    images, labels = torch.randn(BATCH, 3, pixels, pixels), torch.randint(10, (BATCH,))
    expected = gradients(network, images, labels)
    apply_layout(network, "cpu")
    largest = 0.0
    for _ in range(STEPS):
        found = gradients(network, images, labels)
        for name, gradient in expected.items():
            scale = gradient.abs().max().item() or 1.0
            largest = max(largest, (found[name] - gradient).abs().max().item() / scale)
    return largest


def main(threads: str) -> None:
    torch.set_num_threads(int(threads))
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ or not onednn_supports_bf16()
    for shape in SHAPES:
        difference = largest_difference(*shape)
        if not difference < TOLERANCE:
            print("depth {} width {} stem {} pixels {}".format(*shape), f"differs by {difference:.2g}", flush=True)
    print("compared", len(SHAPES), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
