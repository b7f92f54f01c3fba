import importlib.util
import os
import platform
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import data_modules  # noqa: F401  # part of the compared code
import lightning_modules  # noqa: F401
import rankzero
from rankzero.preflight import environment
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN
from rankzero.preflight.environment import check_launcher, clock_differences, combined
from running import world_of


def run_checks(coordinator):
    """Returns the results of the launcher with a wrong and a right setting of rank 1, and those of three imports."""
    rank, of_launcher = coordinator.world.rank, []
    for interface in ("^lo", "lo"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setenv("GLOO_SOCKET_IFNAME", interface)
            of_launcher.append(check_launcher(coordinator, world_of("cpu", size=2)))
    of_imports = [
        environment.check_imports(coordinator, seconds and seconds * (rank + 1)) for seconds in (5.0, 15.0, None)
    ]
    return of_launcher, of_imports


def test_a_setting_of_one_rank_and_the_slowest_import_are_named_on_all_ranks(on_ranks):
    results = on_ranks(run_checks, 2)
    for (wrong, right), (*known, unknown) in results:
        assert wrong.status == FAIL and "rank 1" in wrong.details[0] and "rank 0" not in wrong.details[0]
        assert right.status == OK and not right.details and "1 thread and " in right.summary
        assert [check.status for check in known] == [OK, WARN] and unknown.status == SKIPPED
        assert all("the slowest: rank 1" in check.summary for check in known)
    assert len(results[0][0][1].values["ranks"]) == 2  # the report of rank zero


def run_check_processes(coordinator, seconds):
    return environment.check_processes(coordinator, world_of("cpu", size=coordinator.world.size), seconds)


def test_all_processes_are_listed(on_ranks):
    check, _ = on_ranks(run_check_processes, 2, 1.25)
    assert check.summary == "all 2 processes on 1 host have connected, after 1.2 s"
    assert [row["rank"] for row in check.values["ranks"]] == [0, 1]
    assert all(f"rank {rank} on " in line and ", cpu, process " in line for rank, line in enumerate(check.details))
    (check,) = on_ranks(run_check_processes, 1, None)
    assert check.summary.startswith("one process on ")


def test_rankzeros_code_covers_all_its_files():
    code = environment.rankzero_code()
    assert "rankzero/trainer.py" in code and "rankzero/preflight/environment.py" in code
    assert len(code) == len(list(Path(rankzero.__file__).parent.rglob("*.py")))


def test_the_users_code_covers_imported_modules_outside_of_libraries(tmp_path, monkeypatch):
    own = tmp_path / "my_model.py"
    own.write_text("x = 1\n")
    add_module(monkeypatch, "my_model", own)
    add_module(monkeypatch, "__main__", f"{sysconfig.get_path('scripts')}/rankzero")
    add_module(monkeypatch, "my_extension", "/home/me/my_extension.cpython-311-x86_64-linux-gnu.so")
    before = environment.user_code()
    assert {"my_model", "lightning_modules", "data_modules"} <= set(before)
    assert not {"torch", "json", "rankzero", "builtins", "__main__", "my_extension"} & set(before)
    own.write_text("x = 2\n")
    assert environment.user_code()["my_model"] != before["my_model"]


def test_a_lazy_module_is_not_loaded_and_an_entry_that_only_looks_like_a_module_has_no_source(tmp_path, monkeypatch):
    class Library:  # like those of cffi, which MLflow imports
        __slots__ = ()
        __class__ = property(lambda self: type(sys))

    (tmp_path / "lazy.py").write_text("raise ImportError('loaded')\n")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "lazy", module)
    assert "lazy" in environment.user_code()
    monkeypatch.setitem(sys.modules, "library", Library())
    assert isinstance(Library(), type(sys)) and "library" not in environment.user_code()


def test_a_combined_digest_depends_on_names_and_contents_and_not_on_their_order(tmp_path):
    assert combined({"a": "1", "b": "2"}) == combined({"b": "2", "a": "1"}) != combined({"a": "2", "b": "1"})
    assert environment.digests({"missing": tmp_path / "missing.py", "folder": tmp_path}) == {}  # cannot be read


CONFIG = {"model.width": 8, "model.token": "a", "data.folder": "/data", "trainer.max_epochs": 3, "trainer.logger": True}


def compare(coordinator, folder):
    """Checks two ranks for each case, of which the second rank is changed."""
    checks, is_second = [], coordinator.world.rank == 1
    for change, *_ in CASES:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(change, str) and (is_second or change != "only_here"):
                file = folder / f"{change}.{os.getpid()}.py"
                file.write_text(f"x = {is_second}")
                add_module(patch, change, file)
            elif callable(change) and is_second:
                change(patch)
            settings = CONFIG | (change if isinstance(change, dict) and is_second else {})
            weights = {"layer.weight": change[0] if isinstance(change, tuple) and is_second else "float32 [4, 3]"}
            checks.append(environment.check_environment(coordinator, world_of("cpu", size=2), settings, weights))
    return checks


def add_module(patch, name, file):
    module = types.ModuleType(name)
    module.__file__ = str(file)
    patch.setitem(sys.modules, name, module)


CASES = [
    ({}, OK, ""),
    (lambda patch: patch.setattr(torch, "__version__", "2.14.0"), FAIL, f"torch: {torch.__version__} on rank 0 "),
    (lambda patch: patch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "1")), FAIL, "Python: 3."),
    (lambda patch: patch.setattr(platform, "python_version", lambda: "3.99.1"), WARN, "Python patch level: 3."),
    (lambda patch: patch.setattr(sys, "prefix", "/other"), WARN, f"virtual environment: {sys.prefix} on rank 0 "),
    (lambda patch: patch.setenv("NCCL_ALGO", "Ring"), WARN, "NCCL_ALGO: none on rank 0 "),
    ("only_here", OK, ""),
    ("my_model", FAIL, "my_model: "),
    ("data.transforms", FAIL, "data.transforms: "),
    ({"trainer.max_epochs": 4}, FAIL, "trainer.max_epochs: 3 on rank 0 "),
    ({"model.depth": 1}, FAIL, "model.depth: none on rank 0 "),
    ({"data.folder": "/scratch"}, WARN, "data.folder: /data on rank 0 "),
    ({"trainer.logger": False}, OK, ""),
    ({"trainer.logger.class_path": "x"}, OK, ""),
    ({"model.logger": 2}, FAIL, "model.logger: none on rank 0 "),
    ({"seed": 2, "log_every_n_steps": 5, "json": "b.json"}, OK, ""),
    ({"model.weights": "/local/n2/x.pt"}, WARN, "model.weights: none on rank 0 "),
    ({"local_rank": 1}, WARN, "local_rank: none on rank 0 "),
    ({"batch_size": 64}, FAIL, "batch_size: none on rank 0 "),
    ({"trainer.max_time": "00:01:00:00"}, WARN, "trainer.max_time: none on rank 0 "),
    ({"model.backbone": "google/vit"}, FAIL, "model.backbone: none on rank 0 "),
    ({"model.token": "def"}, FAIL, "model.token: ... (different secrets)"),
    (("float32 [6, 3]",), FAIL, "layer.weight: float32 [4, 3] on rank 0 "),
]
"""What is different on the second rank (flags, the name of a module, a parameter, or a patch), and the result."""


def test_differences_between_ranks_are_named_unless_they_are_allowed(on_ranks, tmp_path):
    for checks in on_ranks(compare, 2, tmp_path):
        for check, (change, status, text) in zip(checks, CASES, strict=True):
            assert check.status == status, check
            assert check.details[0].startswith(text) if text else not check.details, check
            assert isinstance(change, dict) or status == OK or "; " in check.details[0], check
            if isinstance(change, str) and status == FAIL:
                assert check.advice == ["use the same files on all hosts"]


def test_the_clocks_of_ranks_are_compared_from_readings_that_bound_the_difference():
    assert clock_differences([(100.0, 100.1), (100.05, 100.2), (190.0, 190.1), (10.0, 10.1)]) == [0, 0, 90.0, -90.0]
    assert clock_differences([(100.0, 100.1), (95.0, 103.0), (100.0, 130.0)]) == [0, 0, 0]  # delayed ranks


@pytest.mark.parametrize("driver", ["580.159.04", "unknown"])
def test_a_gpu_is_described_with_the_version_of_its_driver(tmp_path, monkeypatch, driver):
    file = tmp_path / "version"
    if driver != "unknown":  # a kernel that does not show it
        file.write_text(driver + "\n")
    gpu = types.SimpleNamespace(name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr("rankzero.preflight.environment.NVIDIA_DRIVER_VERSION", file)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = environment.describe_environment(world_of("cuda", size=2))
    assert (found["GPU"], found["driver"]) == ("H100, 80 GiB", driver)
