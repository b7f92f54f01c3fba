import os
import platform
import sys
import types
from pathlib import Path

import pytest
import torch

from rankzero.distributed.devices import WorldInfo
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.environment import (
    check_environment,
    clock_differences,
    describe_environment,
    different_parts,
)

CONFIG = {
    "model.width": 8,
    "model.token": "abc",
    "data.folder": "/data",
    "trainer.max_epochs": 3,
    "trainer.logger": True,
}


def compare(coordinator, cases, folder):
    """Checks two ranks for each case, of which the second rank is changed."""
    checks = []
    for change, config, *_ in cases:
        with pytest.MonkeyPatch.context() as patch:
            is_second, settings = coordinator.launch.rank == 1, dict(CONFIG)
            if is_second:
                settings |= config
            if change in (own_module, other_module, other_data_module):
                change(patch, folder, is_second)
            elif change and is_second:
                change(patch)
            checks.append(check_environment(coordinator, WorldInfo("cpu", size=2), settings))
    return checks


def other_torch(patch):
    patch.setattr(torch, "__version__", "2.14.0")


def other_virtual_environment(patch):
    patch.setattr(sys, "prefix", "/other")


def other_patch_level(patch):
    patch.setattr(platform, "python_version", lambda: "3.99.1")


def other_python(patch):
    patch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "1"))


def other_variable(patch):
    patch.setenv("NCCL_ALGO", "Ring")


def own_module(patch, folder, is_second):
    if is_second:
        add_module(patch, folder, "only_here", "x = 1")


def other_module(patch, folder, is_second):
    add_module(patch, folder, "my_model", f"x = {is_second}")


def other_data_module(patch, folder, is_second):
    add_module(patch, folder, "data.transforms", f"x = {is_second}")


def add_module(patch, folder, name, text):
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.{os.getpid()}.py")
    Path(module.__file__).write_text(text)
    patch.setitem(sys.modules, name, module)


CASES = [
    (None, {}, OK, ""),
    (other_torch, {}, FAIL, f"torch: {torch.__version__} on rank 0 "),
    (other_python, {}, FAIL, "Python: 3."),
    (other_patch_level, {}, WARN, "Python patch level: 3."),
    (other_virtual_environment, {}, WARN, f"virtual environment: {sys.prefix} on rank 0 "),
    (other_variable, {}, WARN, "NCCL_ALGO: none on rank 0 "),
    (own_module, {}, OK, ""),
    (other_module, {}, FAIL, "my_model: "),
    (other_data_module, {}, FAIL, "data.transforms: "),
    (None, {"trainer.max_epochs": 4}, FAIL, "trainer.max_epochs: 3 on rank 0 "),
    (None, {"model.depth": 1}, FAIL, "model.depth: none on rank 0 "),
    (None, {"data.folder": "/scratch"}, WARN, "data.folder: /data on rank 0 "),
    (None, {"trainer.logger": False}, OK, ""),
    (None, {"trainer.logger.class_path": "x"}, OK, ""),
    (None, {"model.logger": 2}, FAIL, "model.logger: none on rank 0 "),
    (None, {"seed": 2, "log_every_n_steps": 5, "json": "b.json"}, OK, ""),
    (None, {"model.weights": "/local/n2/x.pt"}, WARN, "model.weights: none on rank 0 "),
    (None, {"local_rank": 1}, WARN, "local_rank: none on rank 0 "),
    (None, {"batch_size": 64}, FAIL, "batch_size: none on rank 0 "),
    (None, {"trainer.max_time": "00:01:00:00"}, WARN, "trainer.max_time: none on rank 0 "),
    (None, {"model.backbone": "google/vit"}, FAIL, "model.backbone: none on rank 0 "),
    (None, {"model.token": "def"}, FAIL, "model.token: ... (different secrets)"),
]


def test_differences_between_ranks_are_named_unless_they_are_allowed(on_ranks, tmp_path):
    for checks in on_ranks(compare, 2, CASES, tmp_path):
        for check, (change, _, status, text) in zip(checks, CASES, strict=True):
            assert check.status == status, check
            assert check.details[0].startswith(text) if text else not check.details, check
            assert change is None or status == OK or "; " in check.details[0], check
            if change in (other_module, other_data_module):
                assert check.advice == ["use the same files on all hosts"]


def test_the_clocks_of_ranks_are_compared_from_readings_that_bound_the_difference():
    assert clock_differences([(100.0, 100.1), (100.05, 100.2), (190.0, 190.1), (10.0, 10.1)]) == [0, 0, 90.0, -90.0]
    assert clock_differences([(100.0, 100.1), (95.0, 103.0), (100.0, 130.0)]) == [0, 0, 0]  # delayed ranks


def test_missing_names_are_different_unless_they_are_ignored():
    parts = [{"a": "1", "b": "2"}, {"a": "1"}]
    assert different_parts(parts, ["n1", "n2"], ignores_missing=True) == {}
    assert different_parts(parts, ["n1", "n2"], ignores_missing=False) == {
        "b": ["2 on rank 0 (n1)", "none on rank 1 (n2)"]
    }


@pytest.mark.parametrize("driver", ["580.159.04", "unknown"])
def test_a_gpu_is_described_with_the_version_of_its_driver(tmp_path, monkeypatch, driver):
    file = tmp_path / "version"
    if driver != "unknown":  # a kernel that does not show it
        file.write_text(driver + "\n")
    gpu = types.SimpleNamespace(name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr("rankzero.preflight.environment.NVIDIA_DRIVER_VERSION", file)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = describe_environment(WorldInfo("cuda", size=2))
    assert (found["GPU"], found["driver"]) == ("H100, 80 GiB", driver)
