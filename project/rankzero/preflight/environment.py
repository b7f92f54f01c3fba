"""Checks that all ranks run the same code in the same environment."""

import hashlib
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import torch

import rankzero
from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.relevant import relevant_variables
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.preflight.check import FAIL, OK, WARN, Check, differences, gather

MUST_BE_EQUAL = ("Python", "torch", "lightning", "Rankzero's code", "your code", "config")
"""Properties that must be equal on all ranks; other differences are only shown."""

CLOCK_SECONDS = 1.0
"""Difference between the clocks of two hosts that is shown."""

MAX_HASHED_FILES = 2000


def check_environment(coordinator: Coordinator, world: WorldInfo, config: str = "") -> Check:
    """Compares versions, code, settings and limits of all ranks. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        world: The devices of all processes.
        config: The configuration of the run as text.
    """
    values, errors = gather(coordinator, lambda: describe_environment(world, config))
    clocks = _clock_differences(coordinator)
    hosts = [member.host for member in coordinator.members]
    names = list(dict.fromkeys(name for value in values for name in value or {}))
    different = {name: differences([(value or {}).get(name, "none") for value in values], hosts) for name in names}
    different = {name: texts for name, texts in different.items() if texts}
    skewed = [text for text in _clock_texts(clocks, hosts)]
    failed = [name for name in different if name in MUST_BE_EQUAL]
    details = [f"{name}: {'; '.join(texts)}" for name, texts in different.items()]
    details += [*skewed, *(f"rank {rank} on {hosts[rank]}: {error}" for rank, error in errors.items())]
    status = FAIL if failed or errors else WARN if details else OK
    found = f"{', '.join(different)} differ{'s' * (len(different) == 1)}" if different else ""
    problems = "; ".join(filter(None, [found, "the clocks differ" if skewed else ""]))
    first = values[0] or {}
    equal = f"torch {first.get('torch')}, lightning {first.get('lightning')}, Python {first.get('Python')} on all ranks"
    advice = [f"install the same {name} on all hosts" for name in failed[:3] if name in ("Python", "torch", "lightning")]
    advice += [f"use the same {name} on all hosts" for name in failed if name in ("Rankzero's code", "your code")]
    advice += ["start all ranks with the same flags"] * ("config" in failed)
    advice += ["synchronize the clocks (chrony, NTP)"] * bool(skewed)
    per_rank = [{**(value or {}), "clock": clock} for value, clock in zip(values, clocks, strict=True)]
    return Check("environment", status, problems or equal, tuple(details), tuple(advice), {"ranks": per_rank})


def describe_environment(world: WorldInfo, config: str) -> dict[str, Any]:
    """Returns the properties of this process that are compared, by name."""
    properties: dict[str, Any] = {
        "Python": platform.python_version(),
        "executable": sys.executable,
        "virtual environment": sys.prefix,
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "lightning": lightning.__version__,
        "CUDA": torch.version.cuda or "none",
        "Rankzero's code": code_hash([Path(rankzero.__file__).parent, *_class_folders()]),
        "your code": files_hash(user_files()),
        "config": hashlib.sha256(config.encode()).hexdigest()[:12],
        "open file limit": _limit(resource.RLIMIT_NOFILE),
        "locked memory limit": _limit(resource.RLIMIT_MEMLOCK),
        **relevant_variables(os.environ),
    }
    if world.accelerator == "cuda":
        device = torch.cuda.get_device_properties(world.index)
        properties |= {
            "GPU": f"{device.name}, {device.total_memory / 2**30:.0f} GiB",
            "driver": str(torch._C._cuda_getDriverVersion()),  # type: ignore[attr-defined]
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if world.backend == "nccl" else "none",
        }
    return properties


def code_hash(folders: Sequence[Path]) -> str:
    """Returns a digest of all Python files in the folders."""
    return files_hash({str(file.relative_to(folder)): file for folder in folders for file in folder.rglob("*.py")})


def user_files() -> dict[str, Path]:
    """Returns the source files of all imported modules that belong to the user, by module name."""
    modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    files = {name: Path(file) for name, file in modules.items() if isinstance(file, str) and is_user_file(file)}
    return dict(sorted(files.items())[:MAX_HASHED_FILES])


def files_hash(files: Mapping[str, Path]) -> str:
    """Returns a digest of names and contents; a file that cannot be read counts as empty."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _class_folders() -> list[Path]:
    """Returns the folders of Rankzero's models and data modules, if they are imported."""
    modules = [sys.modules.get(name) for name in ("lightning_modules", "data_modules")]
    return [Path(module.__path__[0]) for module in modules if module is not None]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _clock_differences(coordinator: Coordinator) -> list[float]:
    """Returns by how many seconds the clock of each rank is ahead of rank zero's. All ranks must call.

    All ranks read their clocks after the same exchange, so that the result is accurate to the time that an exchange
    takes, some tens of milliseconds.
    """
    coordinator.all_gather_object(None)
    times = coordinator.all_gather_object(time.time())
    return [round(seconds - times[0], 3) for seconds in times]


def _clock_texts(clocks: Sequence[float], hosts: Sequence[str]) -> list[str]:
    texts: dict[str, str] = {}
    for seconds, host in zip(clocks, hosts, strict=True):
        if abs(seconds) > CLOCK_SECONDS:
            direction = "ahead of" if seconds > 0 else "behind"
            texts.setdefault(host, f"the clock of {host} is {abs(seconds):.1f} s {direction} the clock of {hosts[0]}")
    return list(texts.values())
