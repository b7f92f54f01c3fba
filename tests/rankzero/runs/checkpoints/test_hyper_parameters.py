"""Hyperparameters that are objects are stored as text, so that a checkpoint can be read without trust."""

import argparse
import collections
import dataclasses
import enum
import functools
import io
import json
import pathlib
import types

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from rankzero.runs.checkpoints.hyper_parameters import split, with_plain_hyper_parameters
from rankzero.runs.checkpoints.manifest import read_manifest
from rankzero.runs.checkpoints.write import write_directory
from running import REPOSITORY, evaluate_in_process, fit_in_process, run


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")


class LikeOmegaconf(collections.abc.MutableMapping):
    """Mapping that resolves values on access and is not a dict, like `omegaconf.DictConfig`."""

    def __init__(self, **content):
        self.content = content

    def __getitem__(self, key):
        if self.content[key] == "???":
            raise KeyError(f"missing: {key}")
        return self.content[key]

    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


Point = collections.namedtuple("Point", "x y")
CYCLE = []
CYCLE.append(CYCLE)

PLAIN = {
    "none": (None, None),
    "number": (3, 3),
    "long": (1 << 1999, 1 << 1999),
    "complex": (1j, 1j),
    "bytes": (b"\0x", b"\0x"),
    "tensor": (torch.arange(3.0), torch.arange(3.0)),
    "parameter": (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    "dtype": (torch.bfloat16, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("cpu")),
    "size": (torch.Size([2, 3]), torch.Size([2, 3])),
    "NumPy number": (np.float32(0.5), 0.5),
    "NumPy double": (np.float64(0.5), 0.5),
    "NumPy text": (np.str_("a"), "a"),
    "NumPy truth": (np.True_, True),
    "nested": ({"a": [1, (2.0, {"b": None})], 3: {4}}, {"a": [1, (2.0, {"b": None})], 3: {4}}),
    "attributes": (AttributeDict(a=1), {"a": 1}),
    "ordered": (collections.OrderedDict(a=1), {"a": 1}),
    "default": (collections.defaultdict(list, a=[1]), {"a": [1]}),
    "omegaconf": (LikeOmegaconf(a=LikeOmegaconf(b=1)), {"a": {"b": 1}}),
    "read-only": (types.MappingProxyType({"a": 1}), {"a": 1}),
    "deque": (collections.deque([1, 2]), [1, 2]),
}

OBJECTS = {
    "partial": functools.partial(torch.optim.SGD, lr=0.1),
    "module": torch.nn.Linear(2, 2),
    "lambda": lambda: 0,
    "class": torch.optim.Adam,
    "function": torch.relu,
    "enum": Color.RED,
    "number enum": Level.LOW,
    "subclass of str": Text("x"),
    "path": pathlib.Path("x"),
    "dataclass": Settings(),
    "namespace": argparse.Namespace(a=1),
    "named tuple": Point(1, 2),
    "array": np.arange(3),
    "long double": np.longdouble(1),
    "too long": 1 << 2001,
    "generator": torch.Generator(),
    "unprintable": Unprintable(),
    "cycle": CYCLE,
    "within a list": [1, {"a": torch.nn.ReLU()}],
    "missing in omegaconf": LikeOmegaconf(a="???"),
    "loss": torch.nn.functional.mse_loss,
}


def read_safely(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def is_equal(first, second):
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_stored(name):
    value, stored = PLAIN[name]
    kept, omitted = split({name: value})
    assert omitted == {} and is_equal(read_safely(kept)[name], stored)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_left_out_and_described(name):
    kept, omitted = split({"lr": 0.1, name: OBJECTS[name]})
    assert read_safely(kept) == {"lr": 0.1} and list(omitted) == [name]
    assert isinstance(omitted[name], str) and 0 < len(omitted[name]) < 400
    json.dumps(omitted)


def test_the_checkpoint_of_the_caller_is_not_changed():
    checkpoint = {"hyper_parameters": AttributeDict(net=torch.nn.ReLU(), width=3), "hparams_type": AttributeDict}
    plain = with_plain_hyper_parameters(checkpoint)
    assert list(checkpoint) == ["hyper_parameters", "hparams_type"] and set(checkpoint["hyper_parameters"]) == {
        "net",
        "width",
    }
    assert plain["hyper_parameters"] == {"width": 3}
    assert plain["hyper_parameters_as_text"] == {"net": "ReLU()"}
    assert plain["hparams_type"] == "lightning.fabric.utilities.data.AttributeDict"


OPTIMIZER = functools.partial(torch.optim.SGD, lr=0.1)


class Net(BoringModel):
    def __init__(self, net=None, width=2, optimizer=OPTIMIZER):
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
    from lightning.pytorch import Trainer

    trainer = Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(module, datamodule=Data())
    stock = trainer._checkpoint_connector.dump_checkpoint()
    write_directory(with_plain_hyper_parameters(stock), tmp_path / "step-00000001")
    torch.save(stock, tmp_path / "stock.ckpt")
    return tmp_path / "step-00000001", tmp_path / "stock.ckpt"


def test_a_module_is_loaded_as_from_a_stock_checkpoint_without_running_code(tmp_path):
    directory, stock = save_both(tmp_path, Net(width=5))
    assert read_manifest(directory)["needs"] == []
    expected = Net.load_from_checkpoint(stock, weights_only=False)
    for path in (directory, directory / "state.pt", str(directory)):
        with pytest.warns(UserWarning, match=r"optimizer=functools\.partial"):
            loaded = Net.load_from_checkpoint(path)
        assert loaded.hparams.width == expected.hparams.width == 5 and loaded.hparams.net is None
        assert torch.equal(loaded.layer.weight, expected.layer.weight)
        with pytest.warns(UserWarning):
            assert Data.load_from_checkpoint(path).hparams.batch_size == 4


def test_an_omitted_object_can_be_passed_to_load_from_checkpoint(tmp_path):
    directory, _ = save_both(tmp_path, Net(net=torch.nn.ReLU()))
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


HYDRA = """
import functools
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Net(BoringModel):
    def __init__(self, net: torch.nn.Module = torch.nn.ReLU(), optimizer=functools.partial(torch.optim.SGD, lr=0.1),
                 act=lambda x: x):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())
"""


@pytest.mark.system
def test_a_run_with_objects_as_hyperparameters_resumes_with_the_same_command(cwd):
    (cwd / "hydra_nets.py").write_text(HYDRA)
    script = str(REPOSITORY / "launch/fit.py")
    for epochs in ("1", "2"):
        result = run("python", script, "--model", "hydra_nets.Net", "--run", "x", "--epochs", epochs, folder=cwd)
        assert "trust_checkpoint" not in result.out + result.err
    assert "resuming from step-" in result.out
    newest = sorted((cwd / "runs/x/checkpoints").iterdir())[-1]
    assert read_manifest(newest)["needs"] == []
    state = torch.load(newest / "state.pt", weights_only=True)
    assert set(state["hyper_parameters_as_text"]) == {"net", "optimizer"}  # Lightning itself drops the lambda
    code = "import hydra_nets, sys; print(hydra_nets.Net.load_from_checkpoint(sys.argv[1]).hparams.net)"
    assert run("python", "-c", code, str(newest / "state.pt"), folder=cwd).out == "ReLU()\n"


TOY = ("--model", "MLP", "--data", "Toy")


def test_an_included_model_is_loaded_from_a_directory(cwd):
    from lightning_modules import MLP

    fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    newest = cwd / "runs/x/checkpoints/step-00000064"
    loaded = MLP.load_from_checkpoint(newest, in_features=20, out_features=1)
    state = torch.load(newest / "state.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert evaluate_in_process("--run", "x") == 0
