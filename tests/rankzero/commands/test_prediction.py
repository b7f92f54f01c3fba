import csv
import json
import shutil
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from data_modules.toy import Toy
from lightning_modules.mlp import MLP
from rankzero.cli.arguments import Arguments, Origins, parse_arguments
from rankzero.commands.prediction import PARTS_FOLDER, KeepPredictions, PartWriter, as_plain, merge, predict, read_split
from rankzero.distributed.world import World
from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import EvaluationBatchSampler
from running import command_of, refusal_of, restore_process_state, weights
from stock import SILENT

COUNT = 11


def write_and_merge(tmp_path, output_of, batch_size=4, world=1, count=COUNT):
    """Writes and merges the outputs of all ranks; `output_of` maps the sample indices of a batch to its output."""
    for rank in range(world):
        writer, batches = PartWriter(tmp_path / "parts", rank), EvaluationBatchSampler(count, batch_size, rank, world)
        for batch in range(len(batches)):
            if samples := batches.samples(batch):
                writer.add(samples, output_of(torch.tensor(samples)))
        writer.flush()
    assert merge(tmp_path / "parts", tmp_path / "predictions.pt") == count
    assert not list((tmp_path / "parts").glob("*"))
    return torch.load(tmp_path / "predictions.pt", weights_only=True)


def read_table(tmp_path):
    with (tmp_path / "predictions.csv").open() as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (4, 1), (100, 1), (1, 2), (4, 3), (2, 5), (3, 20)])
def test_rows_are_in_the_order_of_the_samples(tmp_path, batch_size, world):
    def output_of(numbers):
        return {
            "scores": torch.stack([numbers * 1.0, numbers**2], 1),
            "pair": (numbers, numbers.numpy() * 2),
            "list": [numbers, numbers + 1.5],
            "texts": [f"sample {number}" for number in numbers],
            "ragged": [torch.full((int(number) % 3,), int(number)) for number in numbers],
            "none": None,
        }

    found = write_and_merge(tmp_path, output_of, batch_size, world)
    numbers = torch.arange(COUNT)
    assert torch.equal(found["scores"], torch.stack([numbers * 1.0, numbers**2], 1))
    assert type(found["pair"]) is tuple
    assert torch.equal(found["pair"][0], numbers) and torch.equal(found["pair"][1], numbers * 2)
    assert found["texts"] == [f"sample {number}" for number in range(COUNT)]
    assert [row.tolist() for row in found["ragged"]] == [[number] * (number % 3) for number in range(COUNT)]
    assert found["none"] is None
    assert len(found["list"]) == 2 and torch.equal(found["list"][1], numbers + 1.5)


def test_large_outputs_are_merged_from_several_parts_in_a_mapped_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rankzero.commands.prediction.PART_BYTES", 64)
    found = write_and_merge(tmp_path, lambda numbers: numbers[:, None] + torch.zeros(50), 3, 2)
    assert torch.equal(found, torch.arange(COUNT)[:, None] + torch.zeros(50))


def test_numeric_outputs_are_also_written_as_csv_which_other_outputs_remove(tmp_path):
    write_and_merge(tmp_path, lambda numbers: {"class": numbers, "p": torch.stack([numbers, -numbers], 1) / 2}, 2, 3)
    rows = read_table(tmp_path)
    assert rows[0] == ["sample", "class", "p.0", "p.1"]
    assert rows[1:] == [[str(i), str(i), str(i / 2), str(-i / 2)] for i in range(COUNT)]
    write_and_merge(tmp_path, lambda numbers: numbers)
    assert read_table(tmp_path)[0] == ["sample", "prediction"]
    write_and_merge(tmp_path, lambda numbers: numbers.view(-1, 1, 1))
    assert not (tmp_path / "predictions.csv").exists()


def test_rows_of_different_shapes_become_a_list_and_no_rows_become_none(tmp_path):
    found = write_and_merge(tmp_path, lambda numbers: torch.zeros(len(numbers), int(numbers.max())))
    assert isinstance(found, list) and [len(row) for row in found] == [3] * 4 + [7] * 4 + [10] * 3
    assert write_and_merge(tmp_path, lambda numbers: numbers, count=0) is None
    assert write_and_merge(tmp_path, lambda numbers: None) is None


@pytest.mark.parametrize("output", [torch.tensor(1.0), 3.0, "text", torch.zeros(2, 2), {"a": torch.tensor(1)}])
def test_an_output_without_a_row_for_each_sample_is_refused(tmp_path, output):
    assert "does not have one row per sample" in refusal_of(write_and_merge, tmp_path, lambda numbers: output).found


def test_outputs_are_converted_to_plain_values_or_refused():
    @dataclass
    class Out:
        logits: torch.Tensor
        names: list

    found = as_plain(Out(torch.ones(2, requires_grad=True) * 2, [np.float32(1.5), namedtuple("Pair", "a b")(1, "x")]))
    assert torch.equal(found["logits"], torch.full((2,), 2.0)) and not found["logits"].requires_grad
    assert found["names"] == [1.5, {"a": 1, "b": "x"}] and type(found["names"][0]) is float
    assert as_plain(torch.zeros(1000, 10)[:, 0]).untyped_storage().nbytes() == 4000  # without the rest of the tensor
    error = refusal_of(as_plain, {"model": torch.nn.Linear(1, 1)})
    assert error.found.startswith("it returned a torch.nn.modules.linear.Linear")


def predict_in_process(*arguments):
    with restore_process_state():
        return predict(parse_arguments(command_of("predict"), arguments), World())


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


def test_old_predictions_are_replaced_and_other_files_are_kept(run, cwd, monkeypatch):
    folder = cwd / "out"
    monkeypatch.setenv("HOME", str(cwd))
    (folder / PARTS_FOLDER / "0").mkdir(parents=True)
    for name in ("predictions.pt", "predictions-1.pt", "predictions-1.csv", "notes.txt"):
        (folder / name).write_text("old")
    (folder / PARTS_FOLDER / "0" / "rank-9.pt").write_text("of a prediction that did not finish")
    predict_in_process("--name", "x", "--split", "val", "--output", "~/out")
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
