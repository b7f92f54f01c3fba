"""`--fast yes`: what it chooses, and that a run with it is a run like any other."""

import json

import pytest
import torch
import yaml
from torch import nn

from project import tuning
from project.tuning import choose, computes_in_bf16
from running import evaluate_here, fit, fit_here, weights

RESNET = ("--model", "ResNet", "--model.width", "4", "--data", "SyntheticImages", "--data.count", "32")
SMALL = (*RESNET, "--data.image_size", "8", "--batch_size", "8", "--run", "x", "--fast", "yes")

CONVOLVES = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture
def has_bf16(monkeypatch):
    monkeypatch.setattr(tuning, "computes_in_bf16", lambda accelerator: True)


@pytest.mark.parametrize(
    ("model", "bf16", "asked", "channels_last", "precision"),
    [
        (CONVOLVES, True, None, True, "bf16-mixed"),
        (CONVOLVES, False, None, True, None),
        (CONVOLVES, True, "32", True, None),
        (nn.Linear(2, 2), True, None, False, "bf16-mixed"),
        (nn.Linear(2, 2), False, "16-mixed", False, None),
    ],
)
def test_what_is_chosen(model, bf16, asked, channels_last, precision):
    chosen = choose(model, "cpu", bf16, asked)
    assert (chosen.channels_last, chosen.precision) == (channels_last, precision)
    assert ("channels_last" in chosen.reasons, "as asked" in chosen.reasons) == (channels_last, asked is not None)


@pytest.mark.parametrize(
    ("words", "has"),
    [
        ("flags : avx512f avx512_bf16", True),
        ("Features : fp asimd bf16", True),
        ("flags : avx512f", False),
        ("", False),
    ],
)
def test_a_cpu_is_asked_of_the_kernel(monkeypatch, tmp_path, words, has):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : bf16\n{words}\n")
    monkeypatch.setattr(tuning, "CPUINFO", tmp_path / "cpuinfo")
    assert computes_in_bf16("cpu") is has
    assert not computes_in_bf16("mps")


def test_a_machine_that_says_nothing_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "CPUINFO", tmp_path / "nothing")
    assert not computes_in_bf16("cpu")


def config(folder):
    return yaml.safe_load((folder / "runs/x/config.yaml").read_text())


def test_a_run_says_what_it_chose_and_keeps_it(here, capsys, has_bf16):
    assert fit_here(*SMALL, "--epochs", "1") == 0
    assert "rankzero: --fast: channels_last" in capsys.readouterr().out
    assert (config(here)["fast"], config(here)["trainer"]["precision"]) == ("yes", "bf16-mixed")
    held = weights(here / "runs/x")
    assert not [name for name in held if "_orig_mod" in name]
    assert held["network.conv1.weight"].is_contiguous(memory_format=torch.channels_last)


def test_a_run_that_was_not_asked_stays_as_it_is(here, capsys, has_bf16):
    assert fit_here(*SMALL[:-2], "--epochs", "1") == 0
    assert "--fast" not in capsys.readouterr().out and config(here)["trainer"]["precision"] is None


def test_the_precision_that_was_asked_for_stays(here, has_bf16):
    assert fit_here(*SMALL, "--precision", "32", "--epochs", "1") == 0
    assert str(config(here)["trainer"]["precision"]) == "32"


def test_carried_on_it_ends_with_the_same_weights(here, has_bf16, capsys):
    fit_here(*SMALL, "--epochs", "2", "--model.schedule", "Constant")
    whole = weights(here / "runs/x")
    for epochs in ("1", "2"):
        fit_here(*SMALL, "--run", "y", "--epochs", epochs, "--model.schedule", "Constant")
    assert "precision" not in capsys.readouterr().out.partition("changed since the checkpoint")[2].partition("\n")[0]
    again = weights(here / "runs/y")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_carried_on_where_there_is_no_bf16_it_is_told(here, has_bf16, monkeypatch, capsys):
    fit_here(*SMALL, "--epochs", "1")
    monkeypatch.setattr(tuning, "computes_in_bf16", lambda accelerator: False)
    fit_here(*SMALL, "--epochs", "2")
    assert "--trainer.precision bf16-mixed -> None" in capsys.readouterr().out


def test_two_processes_choose_once_and_are_evaluated_as_any_other(here):
    arguments = (*SMALL, "--epochs", "1", "--devices", "2", "--data.count", "41", "--accelerator", "cpu")
    result = fit(*arguments, folder=here)
    assert result.out.count("rankzero: --fast: ") == 1
    evaluate_here("--run", "x")
    metrics = json.loads((here / "runs/x/evaluate-val.json").read_text())["metrics"]
    assert metrics["val/loss"] == pytest.approx(result.summary()["metrics"]["val/loss"], rel=0.05)  # not in bf16
