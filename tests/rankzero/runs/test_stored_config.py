import datetime
import json
import math

import pytest
import torch
import yaml
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from rankzero.checkpoints.manifest import read_manifest
from rankzero.runs import stored_config
from rankzero.runs.stored_config import as_json, changed_settings, read_config
from running import evaluate_in_process, fit_in_process

USERS_MODULE = """
import functools
import math

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.demos.boring_classes import BoringModel

SGD = functools.partial(torch.optim.SGD, lr=0.25)


class Net(BoringModel):
    def __init__(
        self, names: dict[int, str], limit: float = math.inf, optimizer: OptimizerCallable = SGD, act=torch.nn.ReLU()
    ):
        super().__init__()
        self.save_hyperparameters()
        assert names == {1: "one"} and limit == math.inf

    def training_step(self, batch, batch_idx):
        return self.hparams.act(self.layer(batch)).mean()

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())
"""


def test_a_configuration_is_stored_without_objects_and_read_with_keys_and_numbers_that_json_lacks(cwd, monkeypatch):
    (cwd / "users.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(cwd)
    arguments = ("--model", "users.Net", "--model.names", '{"1": "one"}', "--name", "x", "--epochs")
    assert fit_in_process(*arguments, "1") == 0
    stored = yaml.safe_load((cwd / "runs/x/config.yaml").read_text())
    assert "Unable to serialize" not in str(stored) and "optimizer" not in stored["model"]["init_args"]
    (checkpoint,) = (cwd / "runs/x/checkpoints").iterdir()
    state, manifest = torch.load(checkpoint / "state.pt", weights_only=True), read_manifest(checkpoint)
    assert set(state["hyper_parameters_as_text"]) == {"act", "optimizer"} and manifest["needs"] == []
    arguments_of_model = {"names": {"1": "one"}, "limit": ".inf"}
    assert manifest["rankzero"]["config"]["model"] == {"class_path": "users.Net", "init_args": arguments_of_model}
    assert evaluate_in_process("--name", "x") == 0  # the model asserts that it gets these arguments
    assert fit_in_process(*arguments, "2") == 0
    assert fit_in_process("--config", "runs/x/config.yaml", "--name", "again") == 0


def test_yaml_values_are_converted_for_json():
    value = [math.inf, -math.inf, math.nan, {1: [None, True, 2, 0.5, "a"]}, datetime.date(2026, 1, 2)]
    stored = [".inf", "-.inf", ".nan", {"1": [None, True, 2, 0.5, "a"]}, "2026-01-02"]
    assert as_json(value) == stored == json.loads(json.dumps(stored, allow_nan=False))
    config = {"a": {"b": "Unable to serialize instance <x>", "c": stored}, "d": None}
    assert stored_config.without_objects(config) == {"a": {"c": stored}, "d": None}


@pytest.mark.parametrize("text", ["", "[1]", "a: [", "\t", "model: !!int x"])
def test_a_damaged_file_is_read_as_an_empty_configuration(text):
    assert read_config(text) == {}
    config = {"model": {"class_path": "mine.Net", "init_args": {"lr": 0.1}}, "trainer": {"max_time": None}}
    assert read_config(stored_config.dump_config(config)) == config


def test_changes_name_flags_and_both_values_except_of_secrets():
    stored = {"model": {"class_path": "a.Net", "init_args": {"lr": 0.1, "depth": 3}}, "logger": {"api_key": "abc"}}
    model = {"class_path": "a.Net", "init_args": {"lr": 0.2, "depth": 3}}
    current = {"model": model, "logger": {"api_key": "def"}, "limit": float("inf")}
    expected = ["--model.lr 0.1 -> 0.2", "--logger.api_key ... -> ...", "--limit None -> .inf"]
    assert changed_settings(stored, current) == expected
    assert changed_settings(as_json(current), current) == []


@pytest.mark.parametrize("number", range(4))
def test_the_batch_size_of_a_loader_decides_results_within_a_collection_too(number):
    def config(size):
        loader = DataLoader([1], batch_size=size)
        return stored_config.describe_config(
            None, [loader, [loader], {"a": loader}, CombinedLoader([loader])][number], {}
        )

    (change,) = changed_settings(as_json(config(1)), config(2), only_results=True)
    assert change.endswith("batch_size 1 -> 2") and not changed_settings(as_json(config(1)), config(1))
