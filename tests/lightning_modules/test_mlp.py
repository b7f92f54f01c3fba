import pytest
import torch
from torch import nn

from lightning_modules.mlp import MLP

SIZES = {"in_features": 64, "num_classes": 10}


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"in_features": 20, "out_features": 1}, [(20, 1)]),
        ({"in_features": 20, "out_features": 3, "hidden_sizes": [8]}, [(20, 8), (8, 3)]),
        (SIZES, [(64, 256), (256, 128), (128, 10)]),
        ({**SIZES, "hidden_sizes": []}, [(64, 10)]),
        ({**SIZES, "out_features": 3, "hidden_sizes": [5, 6]}, [(64, 5), (5, 6), (6, 10)]),
    ],
)
def test_layer_sizes_follow_the_options_and_images_are_flattened(options, layers):
    model = MLP(**options)
    linear = [layer for layer in model.network if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == layers
    assert model(torch.rand(2, 2, 2, layers[0][0] // 4)).shape == (2, layers[-1][1])


@pytest.mark.parametrize(
    "options", [{}, {"in_features": 3}, {"in_features": 3, "out_features": 1, "hidden_sizes": [0]}]
)
def test_missing_or_invalid_sizes_are_refused(options):
    with pytest.raises(ValueError, match="MLP"):
        MLP(**options)
