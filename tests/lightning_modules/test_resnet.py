import pytest
import torch
import torchvision
from torch import nn

from lightning_modules.mlp import MLP
from lightning_modules.resnet import ResNet


def model(**options):
    return ResNet(**{"in_channels": 3, "image_size": 32, "num_classes": 10, **options})


def layers_of(network):
    """Returns the names, types and settings (such as strides) of the layers with weights."""
    return {name: repr(layer) for name, layer in network.named_modules() if [*layer.parameters(recurse=False)]}


def both_models(depth):
    expected_model = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    return expected_model, model(depth=depth, image_size=224, num_classes=7).eval()


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_layers_equal_torchvisions(depth):
    with torch.device("meta"):
        expected_model, found_model = both_models(depth)
    assert layers_of(found_model.network) == layers_of(expected_model)


@pytest.mark.parametrize("depth", [18, 50])
def test_outputs_equal_torchvisions_with_the_same_weights(depth):
    """These depths have both kinds of blocks."""
    expected_model, found_model = both_models(depth)
    found_model.network.load_state_dict(expected_model.state_dict())
    images = torch.rand(2, 3, 33, 33)
    with torch.no_grad():
        assert torch.equal(found_model(images), expected_model(images))


@pytest.mark.parametrize(
    ("size", "stem", "kernel"),
    [(8, None, 3), (64, None, 3), (65, None, 7), (224, None, 7), (32, "imagenet", 7), (224, "small", 3)],
)
def test_the_stem_depends_on_the_image_size_unless_it_is_given(size, stem, kernel):
    assert model(image_size=size, stem=stem).network.conv1.kernel_size == (kernel, kernel)


def test_any_channels_image_size_and_classes_are_accepted():
    for channels, size, classes in ((1, 8, 10), (1, 28, 10), (3, 32, 100), (4, 40, 2)):
        net = model(in_channels=channels, image_size=size, num_classes=classes)
        assert net(torch.rand(2, channels, size, size)).shape == (2, classes)
    assert sum(parameter.numel() for parameter in model().parameters()) < 400_000


def test_missing_and_invalid_options_are_refused_but_a_given_stem_needs_no_image_size():
    assert model(image_size=None, stem="small")
    for missing in ("in_channels", "image_size", "num_classes"):
        with pytest.raises(ValueError, match=f"ResNet needs {missing} "):
            model(**{missing: None})
    for options in ({"num_classes": 1}, {"num_classes": 0}, {"in_channels": -1}, {"depth": 20}):
        with pytest.raises(ValueError, match="must be|a classifier needs 2 or more"):
            model(**options)


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


@pytest.mark.parametrize(
    "saved", [model(optimizer=torch.optim.SGD, width=8), MLP(in_features=20, out_features=1)], ids=["ResNet", "MLP"]
)
def test_a_checkpoint_has_the_arguments_of_the_model_and_loads_without_any(tmp_path, saved):
    checkpoint = {"state_dict": saved.state_dict(), "hyper_parameters": dict(saved.hparams)}
    torch.save({**checkpoint, "pytorch-lightning_version": "2.6.6"}, tmp_path / "x.ckpt")
    loaded = type(saved).load_from_checkpoint(tmp_path / "x.ckpt")
    assert dict(loaded.hparams) == dict(saved.hparams) and not {"optimizer", "network"} & set(saved.hparams)
