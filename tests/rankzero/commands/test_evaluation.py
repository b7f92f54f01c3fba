import importlib
import json
import re
import shlex
import sys

import pytest

from rankzero.commands import evaluation
from rankzero.messages import CannotStart, RequestError
from running import as_before, evaluate_here, fit_here


@pytest.fixture
def run(here):
    fit_here("--model", "MLP", "--data", "Digits", "--epochs", "2", "--run", "x")
    return here / "runs" / "x"


def result(path):
    return json.loads(path.read_text())


def test_metrics_of_the_val_split_equal_the_validation_metrics_of_training(run, capsys):
    assert evaluate_here("--run", "x") == 0
    seen = json.loads((run / "summary.json").read_text())["metrics"]
    found = result(run / "evaluate-val.json")
    assert found["metrics"] == {name: value for name, value in seen.items() if name.startswith("val/")}
    assert (found["run"], found["split"], found["samples"]) == ("x", "val", 180)
    assert "180, each once" in capsys.readouterr().out


def test_the_test_split_is_evaluated_and_written_to_the_output_file(run):
    evaluate_here("--run", "x", "--split", "test", "--output", "deep/in/here.json")
    assert set(result(run.parent.parent / "deep/in/here.json")["metrics"]) == {"test/accuracy", "test/loss"}


def test_a_limited_evaluation_counts_only_the_evaluated_samples(run):
    evaluate_here("--run", "x", "--trainer.limit_val_batches", "2", "--batch_size", "32")
    assert result(run / "evaluate-val.json")["samples"] == 64


def test_an_unexpected_error_while_writing_is_raised_unchanged(run, monkeypatch):
    monkeypatch.setattr(evaluation, "write_text", lambda file, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_here("--run", "x")


@pytest.mark.parametrize("size", ["1", "7", "180", "1000"])
def test_the_batch_size_does_not_change_the_metrics(run, size):
    evaluate_here("--run", "x", "--output", "a.json")
    evaluate_here("--run", "x", "--output", "b.json", "--batch_size", size)
    a, b = (result(run.parent.parent / name)["metrics"] for name in ("a.json", "b.json"))
    assert a == pytest.approx(b, abs=1e-6)


def test_the_given_checkpoint_or_by_default_the_newest_run_is_evaluated(run):
    evaluate_here("--checkpoint", str(run / "checkpoints/step-00000023"))
    assert result(run / "evaluate-val.json")["checkpoint"].endswith("step-00000023")
    evaluate_here()
    assert result(run / "evaluate-val.json")["checkpoint"].endswith("step-00000046")


def test_a_checkpoint_outside_its_run_is_evaluated(run, tmp_path):
    moved = (run / "checkpoints/step-00000046").rename(tmp_path / "mine")
    evaluate_here("--checkpoint", str(moved))
    assert result(tmp_path / "mine-evaluate-val.json")["metrics"]


def test_ckpt_path_accepts_null_and_best(run):
    evaluate_here("--name", "x", "--ckpt_path", "null", "--output", "a.json")
    assert result(run.parent.parent / "a.json")["checkpoint"].endswith("step-00000046")
    fit_here("--model", "MLP", "--data", "Digits", "--epochs", "3", "--name", "y", "--keep_best", "max:val/loss")
    evaluate_here("--name", "y", "--ckpt_path", "best", "--output", "b.json")
    best = json.loads((run.parent / "y/summary.json").read_text())["best"]
    assert result(run.parent.parent / "b.json")["checkpoint"].endswith(best)


OTHERS = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
class Net(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.step(batch))
class Data(BoringDataModule):
    def __init__(self, sleep: float = 0.5, count: int = 3):
        super().__init__()
    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.linspace(0, 1, 320).view(10, 32), batch_size=2)
"""


@pytest.fixture
def others(here, monkeypatch):
    (here / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(here)
    yield here
    sys.modules.pop("others", None)


STREAMS = (
    OTHERS
    + """
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.linspace(0, 1, 320).view(10, 32))
class Streamed(Data):
    def __init__(self, mixed: bool = False):
        super().__init__()
        self.mixed = mixed
    def val_dataloader(self):
        streamed = torch.utils.data.DataLoader(Numbers(), batch_size=2)
        return [super().val_dataloader(), streamed] if self.mixed else streamed
class Nets(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.step(batch))
"""
)


@pytest.mark.parametrize("arguments", [(), ("--data.mixed", "true"), ("--trainer.limit_val_batches", "2")])
def test_samples_of_an_iterable_dataset_are_not_counted(others, arguments, capsys):
    (others / "others.py").write_text(STREAMS)
    fit_here("--model", "others.Nets", "--data", "others.Streamed", "--epochs", "1", "--name", "s")
    capsys.readouterr()
    evaluate_here("--name", "s", *arguments)
    assert result(others / "runs/s/evaluate-val.json")["samples"] is None
    out = capsys.readouterr().out
    assert "not counted" in out and "each once" not in out


def test_limited_samples_of_several_loaders_are_counted(others):
    (others / "others.py").write_text(STREAMS.replace("streamed] if", "super().val_dataloader()] if"))
    fit_here("--model", "others.Nets", "--data", "others.Streamed", "--epochs", "1", "--name", "s")
    evaluate_here("--name", "s", "--data.mixed", "true", "--trainer.limit_val_batches", "2")
    assert result(others / "runs/s/evaluate-val.json")["samples"] == 8


def test_a_metric_that_is_not_finite_is_null_in_the_json(others, capsys):
    numbers = {"nan": "self.step(batch) * float('nan')", "inf": "float('inf')", "one": "1.0"}
    logged = "\n".join(f"        self.log({name!r}, {value})" for name, value in numbers.items())
    (others / "others.py").write_text(OTHERS.replace('        self.log("loss", self.step(batch))', logged))
    fit_here("--model", "others.Net", "--data", "others.Data", "--epochs", "1", "--name", "n")
    capsys.readouterr()
    evaluate_here("--name", "n")
    assert result(others / "runs/n/evaluate-val.json")["metrics"] == {"inf": None, "nan": None, "one": 1.0}
    assert re.search(r"nan +│ nan ", capsys.readouterr().out)


def test_evaluating_a_stock_lightning_checkpoint_leaves_its_folder_unchanged(others, capsys):
    from lightning.pytorch import Trainer
    from others import Data, Net  # type: ignore[import-not-found]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with as_before():
        trainer = Trainer(max_steps=1, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(Net(), Data())
        trainer.save_checkpoint("theirs/model.ckpt")
        expected = trainer.validate(trainer.lightning_module, Data(), verbose=False)[0]["loss"]
    evaluate_here("--checkpoint", "theirs/model.ckpt", "--model", "others.Net", "--data", "others.Data")
    found = result(others / "model.ckpt-evaluate-val.json")
    assert found["metrics"]["loss"] == pytest.approx(expected, rel=1e-6) and found["run"] == "model.ckpt"
    assert [path.name for path in (others / "theirs").iterdir()] == ["model.ckpt"]
    assert "val split of model.ckpt" in capsys.readouterr().out


def test_the_error_for_a_removed_argument_names_the_checkpoint_and_a_valid_flag(others):
    fit_here("--model", "others.Net", "--data", "others.Data", "--data.count", "4", "--epochs", "1", "--name", "z")
    (others / "others.py").write_text(OTHERS.replace("sleep: float = 0.5, ", ""))
    del sys.modules["others"]
    importlib.invalidate_caches()
    with pytest.raises(RequestError) as error:
        evaluate_here("--name", "z")
    assert error.value.asked.startswith("data.sleep: 0.5, in the configuration stored in runs/z/checkpoints/step-")
    assert error.value.found.startswith("sleep is no longer an argument of Data")
    flag, _, text = error.value.instead.partition(", where")[0].partition(" ")
    assert (flag, json.loads(shlex.split(text)[0])) == (
        "--data",
        {"class_path": "others.Data", "init_args": {"count": 4}},
    )
    assert evaluate_here("--name", "z", flag, *shlex.split(text)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "y"), "type   --name x"),
        (
            ("--checkpoint", "runs/x/nothing"),
            r"there is no such file or folder\n  type   runs/x/checkpoints/step-00000046",
        ),
        (("--root", "elsewhere"), "there are 0"),
        (("--run", "x", "--output", "/proc/x.json"), "folder you may write to"),
    ],
)
def test_a_wrong_run_checkpoint_root_or_output_is_refused(run, arguments, message):
    with pytest.raises(CannotStart, match=message):
        evaluate_here(*arguments)
