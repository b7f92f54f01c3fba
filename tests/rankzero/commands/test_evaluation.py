import importlib
import json
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest
from checkpoint_files import names
from lightning.pytorch import LightningModule

from rankzero.commands import evaluation
from running import evaluate_in_process, fit_in_process, refusal_of, restore_process_state


@pytest.fixture
def run(trained, cwd):
    shutil.copytree(trained("--model", "MLP", "--data", "Digits", "--epochs", "2"), cwd / "runs")
    return cwd / "runs" / "x"


def read_json(path):
    return json.loads(path.read_text())


def test_metrics_of_the_val_split_equal_the_validation_metrics_of_training_for_any_batch_size(run, capsys):
    assert evaluate_in_process("--run", "x") == 0
    metrics = read_json(run / "summary.json")["metrics"]
    found = read_json(run / "evaluate-val.json")
    assert found["metrics"] == {name: value for name, value in metrics.items() if name.startswith("val/")}
    assert (found["run"], found["split"], found["samples"]) == ("x", "val", 180)
    assert "180, each once" in capsys.readouterr().out
    for size in ("1", "7", "1000"):
        evaluate_in_process("--run", "x", "--output", "other.json", "--batch_size", size)
        other = read_json(run.parent.parent / "other.json")["metrics"]
        assert other == pytest.approx(found["metrics"], abs=1e-6), f"--batch_size {size}"


def test_a_limited_evaluation_of_the_test_split_counts_its_samples_and_is_written_to_the_output_file(run, monkeypatch):
    limits = ("--trainer.limit_test_batches", "2", "--batch_size", "32")
    evaluate_in_process("--run", "x", "--split", "test", "--output", "deep/in/here.json", *limits)
    found = read_json(run.parent.parent / "deep/in/here.json")
    assert set(found["metrics"]) == {"test/accuracy", "test/loss"} and found["samples"] == 64
    monkeypatch.setattr(evaluation, "write_text", lambda file, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # an unexpected error is raised unchanged
        evaluate_in_process("--run", "x", *limits)


def test_a_given_checkpoint_or_by_default_the_newest_run_is_evaluated(run, tmp_path):
    evaluate_in_process("--checkpoint", str(run / "checkpoints/step-00000023"))
    assert read_json(run / "evaluate-val.json")["checkpoint"].endswith("step-00000023")
    evaluate_in_process()
    assert read_json(run / "evaluate-val.json")["checkpoint"].endswith("step-00000046")
    moved = (run / "checkpoints/step-00000046").rename(tmp_path / "mine")  # out of the folder of its run
    evaluate_in_process("--checkpoint", str(moved))
    assert read_json(tmp_path / "mine-evaluate-val.json")["metrics"]


def test_the_best_checkpoint_is_kept_beside_the_newest_and_ckpt_path_accepts_null_and_best(cwd):
    arguments = ("--model", "MLP", "--data", "Toy", "--data.count", "512", "--epochs", "3", "--name", "y")
    fit_in_process(*arguments, "--keep_best", "max:val/loss", "--keep", "1")
    best = read_json(cwd / "runs/y/summary.json")["best"]
    assert best.endswith("step-00000016")  # the loss decreases
    assert names(cwd / "runs/y/checkpoints") == ["step-00000016", "step-00000048"]
    for value, step in (("null", "step-00000048"), ("best", best)):
        evaluate_in_process("--name", "y", "--ckpt_path", value, "--output", "out.json")
        assert read_json(cwd / "out.json")["checkpoint"].endswith(step)


USER_MODULE = """
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
def user_folder(cwd, add_module):
    add_module("others", USER_MODULE)
    return cwd


STREAMED_MODULE = f"""{USER_MODULE}class Numbers(torch.utils.data.IterableDataset):
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
class Limited(Data):
    def val_dataloader(self):
        return [super().val_dataloader()] * 2
"""


def test_samples_of_an_iterable_dataset_are_not_counted_but_those_of_several_loaders_are(cwd, add_module, capsys):
    add_module("others", STREAMED_MODULE)
    fit_in_process("--model", "others.Nets", "--data", "others.Streamed", "--epochs", "1", "--name", "s")
    limit = ("--trainer.limit_val_batches", "2")
    for arguments in ((), ("--data.mixed", "true"), limit):
        capsys.readouterr()
        evaluate_in_process("--name", "s", *arguments)
        assert read_json(cwd / "runs/s/evaluate-val.json")["samples"] is None
        out = capsys.readouterr().out
        assert "not counted" in out and "each once" not in out
    evaluate_in_process("--name", "s", "--data", "others.Limited", *limit)
    assert read_json(cwd / "runs/s/evaluate-val.json")["samples"] == 8


def test_a_split_is_refused_if_the_module_has_no_step_for_it():
    for steps, split, message in (
        (["test_step"], "val", "asked  --split val\n  found  Net has no validation_step\n  type   --split test"),
        (["validation_step"], "test", "Net has no test_step\n  type   --split val"),
        ([], "val", "type   the same command, after adding validation_step to the class"),
    ):
        model = type("Net", (LightningModule,), {step: lambda self, batch, batch_idx: None for step in steps})()
        assert message in str(refusal_of(evaluation.run_split, None, SimpleNamespace(model=model), split, None))


def test_a_metric_that_is_not_finite_is_null_in_the_json(user_folder, capsys):
    numbers = {"nan": "self.step(batch) * float('nan')", "inf": "float('inf')", "one": "1.0"}
    logged = "\n".join(f"        self.log({name!r}, {value})" for name, value in numbers.items())
    (user_folder / "others.py").write_text(USER_MODULE.replace('        self.log("loss", self.step(batch))', logged))
    fit_in_process("--model", "others.Net", "--data", "others.Data", "--epochs", "1", "--name", "n")
    capsys.readouterr()
    evaluate_in_process("--name", "n")
    assert read_json(user_folder / "runs/n/evaluate-val.json")["metrics"] == {"inf": None, "nan": None, "one": 1.0}
    assert re.search(r"nan +│ not finite ", capsys.readouterr().out)


def test_evaluating_a_stock_lightning_checkpoint_leaves_its_folder_unchanged(user_folder, capsys):
    from lightning.pytorch import Trainer
    from others import Data, Net  # type: ignore[import-not-found]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with restore_process_state():
        trainer = Trainer(max_steps=1, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(Net(), Data())
        trainer.save_checkpoint("theirs/model.ckpt")
        expected = trainer.validate(trainer.lightning_module, Data(), verbose=False)[0]["loss"]
    evaluate_in_process("--checkpoint", "theirs/model.ckpt", "--model", "others.Net", "--data", "others.Data")
    found = read_json(user_folder / "model.ckpt-evaluate-val.json")
    assert found["metrics"]["loss"] == pytest.approx(expected, rel=1e-6) and found["run"] == "model.ckpt"
    assert [path.name for path in (user_folder / "theirs").iterdir()] == ["model.ckpt"]
    assert "val split of model.ckpt" in capsys.readouterr().out


def test_the_error_for_a_removed_argument_names_the_checkpoint_and_a_valid_flag(user_folder):
    net = ("--model", "others.Net", "--data", "others.Data", "--data.count", "4")
    fit_in_process(*net, "--epochs", "1", "--name", "z")
    (user_folder / "others.py").write_text(USER_MODULE.replace("sleep: float = 0.5, ", ""))
    del sys.modules["others"]
    importlib.invalidate_caches()
    error = refusal_of(evaluate_in_process, "--name", "z")
    assert error.asked.startswith("data.sleep: 0.5, in the configuration stored in runs/z/checkpoints/step-")
    assert error.found.startswith("sleep is no longer an argument of Data")
    flag, _, text = error.instead.partition(", if")[0].partition(" ")
    expected = {"class_path": "others.Data", "init_args": {"count": 4}}
    assert (flag, json.loads(shlex.split(text)[0])) == ("--data", expected)
    assert evaluate_in_process("--name", "z", flag, *shlex.split(text)) == 0


def test_a_wrong_run_checkpoint_or_output_is_refused(run):
    for arguments, message in {
        ("--run", "y"): "the newest runs: x\n  type   python launch/list.py",
        ("--checkpoint", "runs/x/nothing"): "no such file or folder\n  type   runs/x/checkpoints/step-00000046",
        ("--run", "x", "--output", "/proc/x.json"): "folder where you may write",
    }.items():
        assert re.search(message, str(refusal_of(evaluate_in_process, *arguments)))
