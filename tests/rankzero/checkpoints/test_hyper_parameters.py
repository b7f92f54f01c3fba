"""Hyperparameters that are objects are stored as text, so that a checkpoint can be read without trust."""

import collections
import functools
import io
import json

import numpy as np
import pytest
import torch
from checkpoint_files import serialized
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from rankzero.checkpoints.hyper_parameters import split, with_plain_hyper_parameters
from rankzero.checkpoints.manifest import read_manifest
from rankzero.checkpoints.write import write_directory
from running import train_in_process


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")


class LikeOmegaconf(collections.UserDict):
    """Mapping that is not a dict, like `omegaconf.DictConfig`."""


CYCLE = []
CYCLE.append(CYCLE)
UNCHANGED = (
    {"none": None, "number": 3, "complex": 1j, "bytes": b"\0x", "size": torch.Size([2, 3])}
    | {"tensor": torch.arange(3.0), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    | {"nested": {"a": [1, (2.0, {"b": None})], 3: {4}}}
)
CONVERTED = (
    {"NumPy number": (np.float32(0.5), 0.5), "NumPy double": (np.float64(0.5), 0.5)}
    | {"parameter": (torch.nn.Parameter(torch.ones(2)), torch.ones(2)), "attributes": (AttributeDict(a=1), {"a": 1})}
    | {"default": (collections.defaultdict(list, a=[1]), {"a": [1]})}
    | {"omegaconf": (LikeOmegaconf(a=LikeOmegaconf(b=1)), {"a": {"b": 1}})}
)
PLAIN = {name: (value, value) for name, value in UNCHANGED.items()} | CONVERTED
OBJECTS = (
    {"partial": functools.partial(torch.optim.SGD, lr=0.1), "module": torch.nn.Linear(2, 2), "lambda": lambda: 0}
    | {"class": torch.optim.Adam, "function": torch.relu, "loss": torch.nn.functional.mse_loss}
    | {"named tuple": collections.namedtuple("Point", "x y")(1, 2), "array": np.arange(3)}
    | {"long double": np.longdouble(1), "generator": torch.Generator()}
    | {"unprintable": Unprintable(), "cycle": CYCLE, "within a list": [1, {"a": torch.nn.ReLU()}]}
)


def safe_load(content):
    return torch.load(io.BytesIO(serialized(content)), weights_only=True)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_stored(name):
    value, stored = PLAIN[name]
    kept, omitted = split({name: value})
    found = safe_load(kept)[name]
    assert omitted == {} and (torch.equal(found, stored) if torch.is_tensor(found) else found == stored)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_left_out_and_described(name):
    kept, omitted = split({"lr": 0.1, name: OBJECTS[name]})
    assert safe_load(kept) == {"lr": 0.1} and list(omitted) == [name]
    assert isinstance(omitted[name], str) and 0 < len(omitted[name]) < 400
    json.dumps(omitted)


def test_the_checkpoint_of_the_caller_is_not_changed():
    checkpoint = {"hyper_parameters": AttributeDict(net=torch.nn.ReLU(), width=3), "hparams_type": AttributeDict}
    plain = with_plain_hyper_parameters(checkpoint)
    assert list(checkpoint) == ["hyper_parameters", "hparams_type"]
    assert set(checkpoint["hyper_parameters"]) == {"net", "width"}
    assert plain == {
        "hyper_parameters": {"width": 3},
        "hyper_parameters_as_text": {"net": "ReLU()"},
        "hparams_type": "lightning.fabric.utilities.data.AttributeDict",
    }


class Net(BoringModel):
    def __init__(self, net=None, width=2, optimizer=OBJECTS["partial"]):
        super().__init__()
        self.save_hyperparameters()


class Data(LightningDataModule):
    def __init__(self, collate=torch.utils.data.default_collate, batch_size=4):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(torch.rand(64, 32), self.hparams.batch_size, collate_fn=self.hparams.collate)


class Configured(BoringModel):
    """Module that takes one object with all settings, like many public modules."""

    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters(cfg)
        self.width = cfg["width"]


def save_both(tmp_path, module):
    """Returns a module's checkpoint directory and stock Lightning's checkpoint of the same module."""
    train_in_process(model=module, data=Data(), max_steps=1)
    stock = module.trainer._checkpoint_connector.dump_checkpoint()
    write_directory(with_plain_hyper_parameters(stock), tmp_path / "step-00000001")
    torch.save(stock, tmp_path / "stock.ckpt")
    return tmp_path / "step-00000001", tmp_path / "stock.ckpt"


def test_a_module_is_loaded_as_from_a_stock_checkpoint_without_running_code(tmp_path):
    """An object that the checkpoint omits can be passed."""
    directory, stock = save_both(tmp_path, Net(torch.nn.ReLU(), width=5))
    assert read_manifest(directory)["needs"] == []
    expected = Net.load_from_checkpoint(stock, weights_only=False)
    for path in (directory, directory / "state.pt", str(directory)):
        with pytest.warns(UserWarning, match=r"net=ReLU.*optimizer=functools\.partial"):
            loaded = Net.load_from_checkpoint(path)
        assert loaded.hparams.width == expected.hparams.width == 5 and loaded.hparams.net is None
        assert torch.equal(loaded.layer.weight, expected.layer.weight)
        with pytest.warns(UserWarning):
            assert Data.load_from_checkpoint(path).hparams.batch_size == 4
    with pytest.warns(UserWarning, match="net=ReLU"):
        loaded = Net.load_from_checkpoint(directory, net=torch.nn.Tanh())
    assert isinstance(loaded.hparams.net, torch.nn.Tanh)


@pytest.mark.parametrize("kind", [dict, AttributeDict])
def test_a_module_with_one_configuration_object_is_loaded_as_from_a_stock_checkpoint(tmp_path, kind):
    directory, stock = save_both(tmp_path, Configured(kind(width=7, act=torch.nn.ReLU())))
    expected = Configured.load_from_checkpoint(stock, weights_only=False)
    with pytest.warns(UserWarning, match="act=ReLU"):
        loaded = Configured.load_from_checkpoint(directory / "state.pt")
    assert loaded.width == expected.width == 7 and set(expected.hparams) - set(loaded.hparams) == {"act"}
