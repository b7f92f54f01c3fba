"""Multi-layer perceptron for classification and regression."""

from typing import Any

from torch import nn

from lightning_modules.supervised import Supervised, required


class MLP(Supervised):
    """Linear layers with ReLU between them; without hidden layers, this is linear or logistic regression.

    Args:
        hidden_sizes: Widths of the hidden layers; an empty list means one linear layer. If omitted: 256 and 128 for
            classification, and one linear layer for regression, as in the PyTorch DDP tutorial.
        in_features: Number of elements in one sample, whatever its shape; taken from the data if omitted.
        out_features: Number of values to predict in a regression; taken from the data if omitted.
        num_classes: Number of classes; taken from the data if omitted, None for a regression.
        kwargs: See `Supervised`.
    """

    def __init__(
        self,
        hidden_sizes: list[int] | None = None,
        in_features: int | None = None,
        out_features: int | None = None,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        width = required("in_features", in_features, "MLP", "number of values of a sample")
        if hidden_sizes is None:
            hidden_sizes = [256, 128] if num_classes else []
        if any(size < 1 for size in hidden_sizes):
            raise ValueError(f"MLP: hidden_sizes is {hidden_sizes}; each must be 1 or more")
        output_size = num_classes or required("out_features", out_features, "MLP", "number of values to predict")

        layers: list[nn.Module] = [nn.Flatten()]
        for size in hidden_sizes:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        layers.append(nn.Linear(width, output_size))
        super().__init__(network=nn.Sequential(*layers), num_classes=num_classes, **kwargs)
