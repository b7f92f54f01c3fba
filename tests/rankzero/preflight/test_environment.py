import os
import platform
import sys
import types

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


def compare(coordinator, change=None, config=()):
    """Checks two ranks, of which the second is changed."""
    second, settings = coordinator.launch.rank == 1, dict(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        if second:
            settings |= dict(config)
            if change:
                change(patch)
        return check_environment(coordinator, WorldInfo("cpu", size=2), settings)


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


def own_module(patch):
    add_module(patch, "only_here", "x = 1")


def add_module(patch, name, text):
    file = os.path.join(os.environ["MODULES"], f"{name}.{os.getpid()}.py")  # noqa: PTH118
    with open(file, "w") as stream:  # noqa: PTH123
        stream.write(text)
    module = types.ModuleType(name)
    module.__file__ = file
    patch.setitem(sys.modules, name, module)


def changed_module(coordinator, name):
    with pytest.MonkeyPatch.context() as patch:
        add_module(patch, name, f"x = {coordinator.launch.rank}")
        return compare(coordinator)


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (None, OK, ""),
        (other_torch, FAIL, f"torch: {torch.__version__} on rank 0 "),
        (other_python, FAIL, "Python: 3."),
        (other_patch_level, WARN, "Python patch level: 3."),
        (other_virtual_environment, WARN, f"virtual environment: {sys.prefix} on rank 0 "),
        (other_variable, WARN, "NCCL_ALGO: none on rank 0 "),
        (own_module, OK, ""),
    ],
)
def test_differences_between_ranks_are_named(on_ranks, tmp_path, monkeypatch, change, status, text):
    monkeypatch.setenv("MODULES", str(tmp_path))
    for check in on_ranks(run_compare, 2, change, (), str(tmp_path)):
        assert check.status == status, check
        assert not check.details if status == OK else check.details[0].startswith(text) and "; " in check.details[0]


def run_compare(coordinator, change, config, folder):
    os.environ["MODULES"] = folder
    return compare(coordinator, change, config)


@pytest.mark.parametrize(
    ("config", "status", "details"),
    [
        ({"trainer.max_epochs": 4}, FAIL, "trainer.max_epochs: 3 on rank 0 "),
        ({"model.depth": 1}, FAIL, "model.depth: none on rank 0 "),
        ({"data.folder": "/scratch"}, WARN, "data.folder: /data on rank 0 "),
        ({"trainer.logger": False}, OK, None),
        ({"trainer.logger.class_path": "x"}, OK, None),
        ({"model.logger": 2}, FAIL, "model.logger: none on rank 0 "),
        ({"seed": 2, "log_every_n_steps": 5, "json": "b.json"}, OK, None),
        ({"model.weights": "/local/n2/x.pt"}, WARN, "model.weights: none on rank 0 "),
        ({"local_rank": 1}, WARN, "local_rank: none on rank 0 "),
        ({"batch_size": 64}, FAIL, "batch_size: none on rank 0 "),
        ({"trainer.max_time": "00:01:00:00"}, WARN, "trainer.max_time: none on rank 0 "),
        ({"model.backbone": "google/vit"}, FAIL, "model.backbone: none on rank 0 "),
        ({"model.token": "def"}, FAIL, "model.token: ... (different secrets)"),
    ],
)
def test_different_settings_are_named_unless_they_may_differ(on_ranks, tmp_path, config, status, details):
    for check in on_ranks(run_compare, 2, None, config, str(tmp_path)):
        assert check.status == status, check
        assert check.details[0].startswith(details) if details else not check.details


def run_changed_module(coordinator, folder, name):
    os.environ["MODULES"] = folder
    return changed_module(coordinator, name)


@pytest.mark.parametrize("name", ["my_model", "data.transforms"])
def test_a_changed_module_of_the_user_is_named(on_ranks, tmp_path, name):
    for check in on_ranks(run_changed_module, 2, str(tmp_path), name):
        assert check.status == FAIL and check.details[0].startswith(f"{name}: "), check
        assert check.advice == ["use the same files on all hosts"]


def test_the_clocks_of_ranks_are_compared_from_readings_that_bound_the_difference():
    assert clock_differences([(100.0, 100.1), (100.05, 100.2), (190.0, 190.1), (10.0, 10.1)]) == [0, 0, 90.0, -90.0]


def test_a_delayed_rank_is_not_reported_as_a_wrong_clock():
    assert clock_differences([(100.0, 100.1), (95.0, 103.0), (100.0, 130.0)]) == [0, 0, 0]


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
