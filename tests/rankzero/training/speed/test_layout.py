import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from rankzero.distributed import devices
from rankzero.distributed.devices import computes_in_bf16
from rankzero.training.speed import layout as layout_module
from rankzero.training.speed.layout import agree_on_precision, apply_layout, use_fast_kernels
from running import evaluate_in_process, fit, fit_in_process, weights
from stock import differences

RESNET = ("--model", "ResNet", "--model.width", "16", "--data", "SyntheticImages", "--data.count", "32")
SMALL = (*RESNET, "--data.image_size", "8", "--batch_size", "8", "--run", "x", "--fast", "yes")

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CONVOLUTIONAL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))


@pytest.fixture
def has_bf16(monkeypatch):
    monkeypatch.setattr(layout_module, "computes_in_bf16", lambda accelerator: True)


@pytest.mark.parametrize(
    ("model", "bf16", "requested", "channels_last", "precision"),
    [
        (CONVOLUTIONAL, True, None, True, "bf16-mixed"),
        (CONVOLUTIONAL, False, None, True, None),
        (CONVOLUTIONAL, True, "32", True, None),
        (nn.Linear(2, 2), True, None, False, "bf16-mixed"),
        (nn.Linear(2, 2), False, "16-mixed", False, None),
    ],
)
def test_layout_and_precision_depend_on_model_and_device(model, bf16, requested, channels_last, precision):
    layout = apply_layout(model, "cpu")
    chosen_precision, reason = agree_on_precision(SimpleNamespace(decide=lambda *_: bf16), "cpu", requested)
    assert (layout == "channels_last memory layout", chosen_precision) == (channels_last, precision or requested)
    assert ("channels_last" in layout, "as requested" in reason) == (channels_last, requested is not None)


@pytest.mark.parametrize(
    ("settings", "benchmark"),
    [
        ({}, True),
        ({"deterministic": False, "benchmark": None}, True),
        ({"deterministic": "warn"}, False),
        ({"deterministic": True, "benchmark": True}, True),
    ],
)
@pytest.mark.parametrize(("before", "selected"), [("highest", ["high"]), ("medium", [])])
def test_cuda_uses_tf32_and_measures_kernels_unless_the_run_is_deterministic(
    monkeypatch, settings, benchmark, before, selected
):
    precisions = []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: before)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    assert use_fast_kernels(settings) == {**settings, "benchmark": benchmark}
    assert precisions == selected
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert use_fast_kernels({}) == {"benchmark": False}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert use_fast_kernels({}) == {"benchmark": False}


def conv(*arguments, **settings):
    """Returns a model whose second layer is the given convolution."""
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(*arguments, **settings))


class Functional(nn.Module):
    """Module with a weight whose use is not visible from the module's type."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    ("model", "unsafe"),
    [
        *((conv(count, 32, 1, stride=stride), "1") for count, stride in ((4, 2), (15, (2, 1)))),
        (conv(3, 32, 1, stride=3, padding=1), "1"),
        *((conv(count, count, 1, stride=2, groups=groups), "1") for count, groups in ((32, 4), (8, 8))),
        *((model, None) for model in (conv(16, 4, 1, stride=2), conv(4, 4, 1), conv(4, 4, 1, dilation=2))),
        *((conv(4, 4, size, stride=2), None) for size in (3, (1, 3))),
        (nn.Sequential(nn.ConvTranspose2d(32, 4, 1, stride=2)), "0"),
        (nn.Sequential(nn.ConvTranspose2d(4, 32, 1, stride=2)), None),
        (nn.Conv2d(4, 4, 1, stride=2), "Conv2d"),
        (type("Own", (nn.Conv2d,), {})(4, 4, 1, stride=2), "Own"),
        *((kind(4, 4, 1, stride=2), None) for kind in (nn.Conv1d, nn.Conv3d)),
        (Functional(16, 4, 1, 1), "weight"),
        *((Functional(16, *shape), None) for shape in ((16, 1, 1), (4, 3, 3))),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1, stride=2))), "0"),
    ],
)
def test_layer_with_a_wrong_onednn_gradient_prevents_channels_last_on_the_cpu(model, unsafe):
    assert layout_module.layer_unsafe_in_channels_last(model) == unsafe
    both = nn.Sequential(CONVOLUTIONAL, model)
    on_cuda, on_cpu = apply_layout(both, "cuda"), apply_layout(both, "cpu")
    assert on_cuda == "channels_last memory layout"
    assert (on_cpu == on_cuda) == (unsafe is None) == ("oneDNN" not in on_cpu)


def test_model_with_layers_of_unknown_shape_keeps_its_layout():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.LazyConv2d(16, 3))
    assert "have no shapes yet" in apply_layout(model, "cpu")


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processor", "threads"), [("AVX2", 1), ("AVX2", 2), (None, 2)])
def test_both_layouts_have_the_same_gradients_and_a_limit_of_onednn_disables_bf16(processor, threads):
    """With one thread, oneDNN's bug corrupts the heap; with two threads, gradients are wrong."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"} | (AVX2 if processor else {})
    command = [sys.executable, str(Path(__file__).with_name("layouts.py")), str(threads)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.startswith("compared"), process.stdout + process.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((line, True) for line in ("flags : avx512f avx512_bf16", "Features : fp asimd bf16")),
        *((line, False) for line in ("flags : avx512f", "", None)),
    ],
    ids=str,
)
def test_bf16_support_of_the_cpu_is_read_from_the_kernel_if_it_reports_features(monkeypatch, tmp_path, line, expected):
    if line is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nmodel name : bf16\n{line}\n")
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    assert devices.onednn_supports_bf16() in (True, False)
    monkeypatch.setattr(devices, "onednn_supports_bf16", lambda: True)
    assert computes_in_bf16("cpu") is expected
    monkeypatch.setattr(devices, "onednn_supports_bf16", lambda: False)
    assert not computes_in_bf16("cpu")
    assert not computes_in_bf16("mps")


def config(folder):
    return yaml.safe_load((folder / "runs/x/config.yaml").read_text())


def test_run_prints_and_saves_the_chosen_layout_and_precision(cwd, capsys, has_bf16, monkeypatch):
    monkeypatch.setattr(layout_module, "use_fast_kernels", None)  # not called on a CPU
    assert fit_in_process(*SMALL, "--epochs", "1") == 0
    assert "rankzero: --fast: channels_last" in capsys.readouterr().out
    assert (config(cwd)["fast"], config(cwd)["trainer"]["precision"]) == ("yes", "bf16-mixed")
    saved_weights = weights(cwd / "runs/x")
    assert not [name for name in saved_weights if "_orig_mod" in name]
    assert saved_weights["network.conv1.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [(SMALL[:-2], "None"), ((*SMALL, "--model.width", "4", "--precision", "32"), "32")],
    ids=["without --fast", "a narrow network and a requested precision"],
)
def test_layout_and_precision_are_kept(cwd, capsys, has_bf16, arguments, precision):
    assert fit_in_process(*arguments, "--epochs", "1") == 0
    out = capsys.readouterr().out
    assert ("--fast" in out) == ("--fast" in arguments)
    assert ("because oneDNN's gradient of network.layer2.0.downsample.0" in out) == ("--fast" in arguments)
    assert str(config(cwd)["trainer"]["precision"]) == precision
    assert weights(cwd / "runs/x")["network.layer1.0.conv1.weight"].is_contiguous()


def test_resumed_fast_run_has_the_same_weights_and_reports_a_changed_precision(cwd, has_bf16, monkeypatch, capsys):
    fit_in_process(*SMALL, "--epochs", "2", "--model.schedule", "Constant")
    for epochs in ("1", "2"):
        fit_in_process(*SMALL, "--run", "y", "--epochs", epochs, "--model.schedule", "Constant")
    assert "precision" not in capsys.readouterr().out.partition("changed since the checkpoint")[2].partition("\n")[0]
    assert differences(weights(cwd / "runs/x"), weights(cwd / "runs/y")) == []
    monkeypatch.setattr(layout_module, "computes_in_bf16", lambda accelerator: False)
    fit_in_process(*SMALL, "--run", "y", "--epochs", "3", "--model.schedule", "Constant")
    assert "--trainer.precision bf16-mixed -> None" in capsys.readouterr().out


@pytest.mark.system
def test_two_processes_print_the_choice_once_and_can_be_evaluated(cwd):
    result = fit(*SMALL, "--epochs", "1", "--devices", "2", "--data.count", "41", "--accelerator", "cpu", folder=cwd)
    assert result.out.count("rankzero: --fast: ") == 1
    evaluate_in_process("--run", "x")
    metrics = json.loads((cwd / "runs/x/evaluate-val.json").read_text())["metrics"]
    assert metrics["val/loss"] == pytest.approx(result.summary()["metrics"]["val/loss"], rel=0.05)  # not in bf16
