"""`predict` in this process, compared with the predictions of a stock Lightning Trainer."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from data_modules.toy import Toy
from lightning_modules.mlp import MLP
from rankzero.cli.arguments import Arguments, parse_arguments
from rankzero.cli.config_file import Origins
from rankzero.commands.evaluation import output_path
from rankzero.commands.prediction import PARTS_FOLDER, KeepPredictions, predict, read_split
from rankzero.commands.prediction_files import merge
from rankzero.distributed.world import World
from rankzero.messages import RequestError
from running import command_of, refusal_of, restore_process_state, weights
from stock import SILENT


def parse_flags(*arguments):
    return parse_arguments(command_of("predict"), arguments)


def predict_in_process(*arguments):
    with restore_process_state():
        return predict(parse_flags(*arguments), World())


@pytest.fixture
def run(trained, cwd):
    shutil.copytree(trained("--model", "MLP", "--data", "Toy", "--data.count", "80", "--epochs", "1"), cwd / "runs")
    return cwd / "runs" / "x"


@pytest.mark.parametrize("batch_size", [3, 100])
def test_predictions_equal_those_of_a_stock_trainer(run, batch_size, capsys):
    assert predict_in_process("--name", "x", "--split", "test", "--batch_size", str(batch_size)) == 0
    model, data = MLP(in_features=20, out_features=1), Toy(count=80)
    model.load_state_dict(weights(run))
    data.setup("test")
    with restore_process_state():
        expected = torch.cat(Trainer(**SILENT).predict(model, data.test_dataloader()))
    folder = run / "predictions-test"
    torch.testing.assert_close(torch.load(folder / "predictions.pt", weights_only=True), expected)
    source = {"run": "x", "checkpoint": "runs/x/checkpoints/step-00000003", "split": "test"}
    stored = json.loads((folder / "predictions.json").read_text())
    assert stored == {**source, "world_size": 1, "samples": {"predictions.pt": 10}}
    assert sorted(path.name for path in folder.iterdir()) == ["predictions.csv", "predictions.json", "predictions.pt"]
    assert "10 samples, each once" in capsys.readouterr().out


def test_old_predictions_are_replaced_and_other_files_are_kept(run):
    folder = run.parent.parent / "out"
    (folder / PARTS_FOLDER / "0").mkdir(parents=True)
    for name in ("predictions.pt", "predictions-1.pt", "predictions-1.csv", "notes.txt"):
        (folder / name).write_text("old")
    (folder / PARTS_FOLDER / "0" / "rank-9.pt").write_text("of a prediction that did not finish")
    predict_in_process("--name", "x", "--split", "val", "--output", "out")
    expected = ["notes.txt", "predictions.csv", "predictions.json", "predictions.pt"]
    assert sorted(path.name for path in folder.iterdir()) == expected and (folder / "notes.txt").read_text() == "old"


def test_a_refused_prediction_creates_and_changes_no_files(run, monkeypatch):
    error = refusal_of(predict_in_process, "--name", "x", "--output", "out")
    assert (error.found, error.instead) == ("no predict_dataloader in Toy or MLP", "--split test")
    assert not (run.parent.parent / "out").exists()
    (run.parent.parent / "file").write_text("kept")
    error = refusal_of(predict_in_process, "--name", "x", "--split", "test", "--output", "file")
    assert error.instead.startswith("--output DIR, a folder where you may write")
    assert (run.parent.parent / "file").read_text() == "kept"
    empty_loader = DataLoader(TensorDataset(torch.zeros(0, 20)))
    monkeypatch.setattr(Toy, "predict_dataloader", lambda self: empty_loader, raising=False)
    assert "it has no samples" in refusal_of(predict_in_process, "--name", "x", "--split", "predict").found
    assert not (run / "predictions").exists()


SCALAR_MODULE = """
from lightning_modules.mlp import MLP

class Scalar(MLP):
    def predict_step(self, batch, batch_idx):
        return self(batch[0]).mean()
"""


def test_a_failed_prediction_removes_its_partial_files(run, add_module):
    folder = run.parent.parent / "out"
    add_module("scalar", SCALAR_MODULE)
    for kept in ([], ["notes.txt"]):
        for name in kept:
            folder.mkdir()
            (folder / name).touch()
        with pytest.raises(RequestError, match="does not have one row per sample"):
            predict_in_process(*("--name", "x", "--split", "test", "--output", "out", "--model", "scalar.Scalar"))
        assert folder.exists() is bool(kept) and [path.name for path in folder.glob("*")] == kept


class Staged:
    """Records the stages of `setup`."""

    def __init__(self):
        super().__init__()
        self.stages = []

    def setup(self, stage):
        self.stages.append(stage)


class Net(Staged, LightningModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"number": batch[0][:, 0].long(), "loader": [str(dataloader_idx)] * len(batch[0])}


class Data(Staged, LightningDataModule):
    def test_dataloader(self):
        return new_loader(5)

    def val_dataloader(self):
        return new_loader(6)


class NetWithLoader(Net):
    def test_dataloader(self):
        return new_loader(7)


def new_loader(count, **settings):
    return DataLoader(TensorDataset(torch.arange(float(count))[:, None]), batch_size=3, **settings)


def keep(folder, model, *loaders, **arguments):
    """Predicts with a stock Trainer, and returns the callback that stores the predictions in a folder."""
    callback = KeepPredictions(folder, rank=0, world_size=1)
    with restore_process_state():
        Trainer(callbacks=[callback], **SILENT).predict(model, *loaders, return_predictions=False, **arguments)
    return callback


@pytest.mark.parametrize(
    ("make_model", "make_data", "split", "stage", "count"),
    [
        (Net, Data, "test", "test", 5),
        (Net, Data, "val", "validate", 6),
        (NetWithLoader, Data, "test", "test", 5),
        (NetWithLoader, LightningDataModule, "test", "test", 7),
        (NetWithLoader, lambda: None, "test", "test", 7),
    ],
)
def test_a_split_of_data_module_or_model_is_set_up_as_its_stage(tmp_path, make_model, make_data, split, stage, count):
    model, data = make_model(), make_data()
    read_split(SimpleNamespace(model=model, datamodule=data), split)
    keep(tmp_path, model, datamodule=data)
    merge(tmp_path / "0", tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["number"].tolist() == list(range(count))
    assert model.stages == [stage] and getattr(data, "stages", [stage]) == [stage]


def test_a_split_without_a_dataloader_is_refused():
    flags = Arguments(command_of("predict"), {}, origins=Origins(["--name", "my run"]))
    for data, split, found, instead in (
        (Data(), "predict", "no predict_dataloader in Data or Net", "--split test"),
        (LightningDataModule(), "val", "no val_dataloader in LightningDataModule or Net", "a data module with"),
        (None, "test", "no test_dataloader in Net", "a data module with a test_dataloader"),
    ):
        error = refusal_of(read_split, SimpleNamespace(model=Net(), datamodule=data, flags=flags), split)
        assert (error.found, error.instead[: len(instead)]) == (found, instead)
        assert error.asked == "predict --name 'my run'"


@pytest.mark.filterwarnings("ignore:.*has shuffling enabled")
@pytest.mark.parametrize(
    ("count", "settings"), [(1, {}), (7, {}), (7, {"shuffle": True}), (7, {"drop_last": True})], ids=str
)
def test_predictions_of_a_users_loader_are_stored_in_reading_order(tmp_path, count, settings):
    torch.manual_seed(0)
    seen = []

    class RecordingNet(Net):
        def predict_step(self, batch, batch_idx):
            seen.extend(batch[0][:, 0].tolist())
            return batch[0][:, 0]

    keep(tmp_path, RecordingNet(), new_loader(count, **settings))
    assert merge(tmp_path / "0", tmp_path / "all.pt") == len(seen)
    assert torch.load(tmp_path / "all.pt", weights_only=True).tolist() == seen


@pytest.mark.filterwarnings("ignore:.*across ranks is zero")
def test_predictions_of_each_loader_are_stored_separately(tmp_path):
    assert keep(tmp_path, Net(), new_loader(0)).writers == []  # Lightning calls no hook for an empty loader
    keep(tmp_path, Net(), [new_loader(4), new_loader(5)])
    for number, count in enumerate((4, 5)):
        assert merge(tmp_path / str(number), tmp_path / "all.pt") == count
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        assert found["number"].tolist() == list(range(count)) and found["loader"] == [str(number)] * count


def test_a_users_sampler_is_refused_on_several_processes(tmp_path):
    loader = new_loader(4, sampler=SubsetRandomSampler(range(4)))
    trainer = SimpleNamespace(predict_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader])))
    for world_size in (2, 3):
        error = refusal_of(KeepPredictions(tmp_path, 0, world_size).on_predict_start, trainer, Net())
        assert error.asked == f"predictions on {world_size} processes"
        assert error.instead == "--devices 1, without a launcher"


def test_predictions_are_written_into_the_run_or_the_output_folder(cwd, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (cwd / "runs/x/checkpoints/step-1").mkdir(parents=True)
    (cwd / "runs/x/run.json").write_text("{}")
    for arguments, checkpoint, folder in (
        ("", "runs/x/checkpoints/step-1", "runs/x/predictions"),
        ("--output here", "runs/x/checkpoints/step-1", "here"),
        ("", "else/where/a.ckpt", "a.ckpt-predictions"),  # not in a run
        ("--output ~/out", "a/b/c", "/home/me/out"),
    ):
        assert output_path(parse_flags(*arguments.split()), Path(checkpoint), "predictions") == Path(folder)
