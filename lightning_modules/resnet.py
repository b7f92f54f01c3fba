"""Residual networks (He et al. 2016) built from torchvision's blocks."""

from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from lightning_modules.supervised import Supervised, required

BLOCKS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    10: (BasicBlock, (1, 1, 1, 1)),
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}
"""Depth -> the type of block, and the number of blocks in each of the four stages."""

SMALL_IMAGE = 64
"""Largest side length in pixels for which the default stem is `small`, which does not downsample the image."""


class ResNet(Supervised):
    """Residual network that classifies images.

    Args:
        depth: Number of layers with weights. Depth 10 has one block per stage and, by default, few channels.
        width: Channels of the first stage; the number doubles in each further stage. If omitted: 64, or 16 at depth 10.
        stem: `small` is one 3x3 convolution (He et al. for CIFAR-10); `imagenet` is a 7x7 convolution with stride 2
            followed by max pooling. If omitted: `small` for images up to 64x64 pixels.
        in_channels: Channels of an image; taken from the data if omitted.
        image_size: Length of an image's longer side in pixels; taken from the data if omitted.
        num_classes: Number of classes; taken from the data if omitted.
        kwargs: See `Supervised`.
    """

    def __init__(
        self,
        depth: Literal[10, 18, 34, 50, 101, 152] = 10,
        width: int | None = None,
        stem: Literal["small", "imagenet"] | None = None,
        in_channels: int | None = None,
        image_size: int | None = None,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        channels = required("in_channels", in_channels, "ResNet", "number of channels of an image")
        classes = required("num_classes", num_classes, "ResNet", "classes")
        if stem is None:
            pixels = required("image_size", image_size, "ResNet", "height and width of an image in pixels")
            stem = "small" if pixels <= SMALL_IMAGE else "imagenet"
        if depth not in BLOCKS:
            raise ValueError(f"ResNet: depth is {depth}; it must be one of {', '.join(map(str, BLOCKS))}")
        network = ResidualNetwork(depth, width or (16 if depth == 10 else 64), stem, channels, classes)
        super().__init__(network=network, num_classes=classes, **kwargs)


class ResidualNetwork(nn.Module):
    """Network that maps images of shape `(batch, channels, height, width)` to logits of shape `(batch, classes)`.

    The submodules have torchvision's names, so that weights of torchvision's ResNets can be loaded if the shapes match.
    """

    def __init__(self, depth: int, width: int, stem: Literal["small", "imagenet"], channels: int, classes: int) -> None:
        super().__init__()
        block, block_counts = BLOCKS[depth]
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(block, block_counts[0], width, width, stride=1)
        self.layer2 = _stage(block, block_counts[1], width * block.expansion, width * 2, stride=2)
        self.layer3 = _stage(block, block_counts[2], width * 2 * block.expansion, width * 4, stride=2)
        self.layer4 = _stage(block, block_counts[3], width * 4 * block.expansion, width * 8, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * 8 * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits of shape `(batch, classes)`."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


def _stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, channels: int, width: int, stride: int
) -> nn.Sequential:
    """Returns `count` blocks; the first block may halve the image size and change the number of channels."""
    out_channels = width * block.expansion
    shortcut = None
    if stride != 1 or channels != out_channels:
        shortcut = nn.Sequential(
            nn.Conv2d(channels, out_channels, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
        )
    first_block = block(channels, width, stride, shortcut)
    return nn.Sequential(first_block, *(block(out_channels, width) for _ in range(count - 1)))
