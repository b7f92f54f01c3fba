"""Compares `predict` on one to three processes with a stock Trainer's predictions on one."""

import json
import shutil

import pytest
import torch
from lightning.pytorch import Trainer

from running import restore_process_state
from stock import SILENT
from system.forks import fit_on_ranks, outputs

USER_MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, returns: str = "tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.returns, self.layer = returns, torch.nn.Linear(1, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        numbers = batch[0][:, 0].long()
        scores = self.layer(batch[0]) + dataloader_idx
        if self.returns == "dict":
            return {"scores": scores, "sample": numbers, "text": [f"s{int(number)}" for number in numbers]}
        if self.returns == "scalar":
            return scores.mean()
        return {"tensor": scores, "tuple": (scores, numbers), "none": None}[self.returns]

class Data(LightningDataModule):
    def __init__(self, count: int = 11, loaders: int = 1, workers: int = 0, batch_size: int = 4, own: bool = False):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.stage = stage

    def _loader(self, count, drop_last=True):
        rows, own = TensorDataset(torch.arange(float(count))[:, None]), self.hparams.own
        sampler = torch.utils.data.SubsetRandomSampler(range(count)) if own else None
        settings = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.workers, "sampler": sampler}
        return DataLoader(rows, drop_last=drop_last, **settings)

    def train_dataloader(self):
        return self._loader(8)

    def test_dataloader(self):
        return self._loader(5)

    def predict_dataloader(self):
        assert self.stage == "predict"
        loaders = [self._loader(self.hparams.count + i) for i in range(self.hparams.loaders)]
        return loaders if len(loaders) > 1 else loaders[0]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(USER_MODULE)
    arguments = ("--model", "mine.Net", "--data", "mine.Data", "--epochs", "1", "--name", "x")
    fit_on_ranks("fit", *arguments, folder=folder)  # as a subcommand of fit.py
    return folder


@pytest.fixture
def user_folder(trained, cwd):
    """Makes a folder with the finished run `x` the working directory, and returns the folder."""
    return shutil.copytree(trained, cwd, dirs_exist_ok=True)


def predict(user_folder, *arguments, world, code=0):
    arguments = ("--name", "x", "--output", "out", *arguments)
    fit_on_ranks(*arguments, folder=user_folder, world=world, script="predict", code=code)
    return [torch.load(file, weights_only=True) for file in sorted((user_folder / "out").glob("*.pt"))]


def stock(user_folder, returns, **data):
    """Returns stock Lightning's predictions from the same checkpoint: for each loader, a list of its batches."""
    module = {}
    exec(compile((user_folder / "mine.py").read_text(), "mine.py", "exec"), module)
    (state,) = (user_folder / "runs/x/checkpoints").glob("*/state.pt")
    net = module["Net"](returns)
    net.load_state_dict(torch.load(state, weights_only=True)["state_dict"])
    with restore_process_state():
        batches = Trainer(**SILENT).predict(net, module["Data"](**data))
    return batches if data.get("loaders", 1) > 1 else [batches]


@pytest.mark.parametrize(("world", "batch_size"), [(1, 4), (2, 3), (3, 4)])
def test_every_sample_is_predicted_once_and_in_order_at_any_world_size(user_folder, world, batch_size):
    (found,) = predict(user_folder, "--model.returns", "dict", "--batch_size", str(batch_size), world=world)
    (expected,) = stock(user_folder, "dict")
    torch.testing.assert_close(found["scores"], torch.cat([batch["scores"] for batch in expected]))
    assert found["sample"].tolist() == torch.cat([batch["sample"] for batch in expected]).tolist() == list(range(11))
    assert found["text"] == [text for batch in expected for text in batch["text"]]
    assert json.loads((user_folder / "out/predictions.json").read_text())["samples"] == {"predictions.pt": 11}
    first_column = [line.split(",")[0] for line in (user_folder / "out/predictions.csv").read_text().split()]
    assert first_column == ["sample", *map(str, range(11))]


def test_several_loaders_are_predicted_even_by_more_processes_than_samples(user_folder):
    settings = ("--model.returns", "tuple", "--data.loaders", "2", "--data.count", "1", "--data.workers", "1")
    found = predict(user_folder, *settings, world=3)
    expected = stock(user_folder, "tuple", loaders=2, count=1)
    for (scores, numbers), batches in zip(found, expected, strict=True):
        torch.testing.assert_close(scores, torch.cat([batch[0] for batch in batches]))
        assert numbers.tolist() == torch.cat([batch[1] for batch in batches]).tolist()


def test_the_subcommand_predict_of_fit_py_accepts_a_custom_sampler_on_one_process(user_folder):
    arguments = ("--name", "x", "--output", "out", "--ckpt_path", "last", "--model.returns", "tuple")
    fit_on_ranks("predict", *arguments, "--data.own", "true", folder=user_folder)
    _, numbers = torch.load(user_folder / "out/predictions.pt", weights_only=True)
    assert sorted(numbers.tolist()) == list(range(11))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.returns", "scalar"), "does not have one row per sample"),
        (("--data.own", "true"), "which rank reads which sample"),
    ],
)
def test_an_impossible_prediction_prints_one_message_and_leaves_no_output(user_folder, arguments, message):
    predict(user_folder, *arguments, world=2, code=2)
    printed = "".join(outputs(user_folder, 2))
    assert printed.count(message) == 1 and "Traceback" not in printed and not (user_folder / "out").exists()
