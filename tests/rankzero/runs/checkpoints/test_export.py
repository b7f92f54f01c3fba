"""Export of weights for other programs; tests/system/test_disks.py exports to a full disk."""

import pytest
import safetensors.torch
import torch

from data_modules import Digits
from lightning_modules import ResNet
from rankzero.messages import CannotStart
from rankzero.runs.checkpoints.export import export_weights
from running import evaluate_in_process, fit_in_process, weights

LOADERS = {".pt": lambda path: torch.load(path, weights_only=True), ".safetensors": safetensors.torch.load_file}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    fit_in_process("--model", "ResNet", "--data", "Digits", "--epochs", "1", "--root", str(root), "--run", "x")
    return root / "x"


@pytest.mark.parametrize(("suffix", "source"), [(".pt", "run"), (".safetensors", "checkpoint")])
def test_exported_weights_load_into_the_same_model(run, cwd, capsys, suffix, source):
    flags = ("--root", str(run.parent), "--run", "x") if source == "run" else ("--checkpoint", str(run))
    assert evaluate_in_process(*flags, "--export", f"deep/model{suffix}") == 0
    file = cwd / "deep" / f"model{suffix}"
    found, expected = LOADERS[suffix](file), weights(run)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    sizes = {name: getattr(Digits(), name) for name in ("in_channels", "image_size", "num_classes")}
    (model := ResNet(**sizes)).load_state_dict(found)
    for loaded in (model, ResNet.load_from_checkpoint(max((run / "checkpoints").iterdir()), **sizes)):
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{len(expected)} tensors" in line and f"{file.stat().st_size:,} bytes" in line
    assert f"{sum(value.numel() for value in expected.values()):,} parameters and buffers" in line
    assert "model.load_state_dict(" in line and [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("suffix", LOADERS)
def test_shared_tensors_and_views_are_exported_and_other_values_only_to_pt(tmp_path, suffix):
    matrix = torch.arange(12.0).reshape(3, 4)
    state = {"embedding": matrix, "head": matrix, "turned": matrix.t(), "part": matrix[1, 1:3]}
    state["none"] = torch.empty(0, 2)
    torch.save({"state_dict": {**state, "_extra_state": {"seen": 3}}}, tmp_path / "x.ckpt")
    assert "5 tensors, 38 parameters" in export_weights(tmp_path / "x.ckpt", tmp_path / f"x{suffix}")
    found = LOADERS[suffix](tmp_path / f"x{suffix}")
    assert found.pop("_extra_state", None) == ({"seen": 3} if suffix == ".pt" else None)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export", "model.onnx"), "ends in .pt or .safetensors"),
        (("--export", "model"), "ends in .pt or .safetensors"),
        (("--export", "/proc/model.pt"), "folder where you may write"),
        (("--export", "x.pt", "--checkpoint", "bare.ckpt"), "contains no weights"),
    ],
)
def test_a_wrong_file_and_a_checkpoint_without_weights_are_refused(run, cwd, arguments, message):
    torch.save({"epoch": 3}, "bare.ckpt")
    with pytest.raises(CannotStart, match=message):
        evaluate_in_process("--root", str(run.parent), *arguments)
    assert not (cwd / "x.pt").exists()
