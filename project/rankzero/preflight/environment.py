"""Checks that all ranks run the same code in the same environment."""

import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning
import torch

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.relevant import relevant_variables
from rankzero.preflight.check import FAIL, OK, WARN, Check, differences, gather
from rankzero.preflight.code import combined, rankzero_code, rankzero_digest, user_code

MUST_BE_EQUAL = ("Python", "torch", "lightning")
"""Packages whose versions must be equal on all ranks; of other properties, differences are only shown."""

MAY_DIFFER = (
    *("logger", "callbacks", "profiler", "enable_progress_bar", "enable_model_summary"),
    *("root", "default_root_dir", "devices", "node_rank", "master_addr", "interface", "start_timeout"),
)
"""Settings that may differ between ranks, for example because only rank zero logs."""

CLOCK_SECONDS = 1.0
"""Difference between the clocks of two hosts that is shown."""

MAX_SHOWN = 5
"""How many different files or settings are shown."""


def check_environment(coordinator: Coordinator, world: WorldInfo, config: Mapping[str, Any]) -> Check:
    """Compares versions, code, settings and limits of all ranks. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        world: The devices of all processes.
        config: The settings of the run: name, such as `trainer.max_epochs`, -> value.
    """
    hosts = [member.host for member in coordinator.members]
    settings = {name: str(value) for name, value in config.items() if name.split(".")[-1] not in MAY_DIFFER}
    code = user_code()

    def describe() -> list[Any]:
        return [describe_environment(world), rankzero_digest(), combined(code), combined(settings)]

    answers, errors = gather(coordinator, describe)
    if errors:
        lines = [f"rank {rank} on {hosts[rank]}: {error}" for rank, error in errors.items()]
        return Check("environment", FAIL, "a rank cannot describe its environment", lines, ("correct this error",))
    properties: list[dict[str, str]] = [answer[0] for answer in answers if answer]
    clocks = _clock_differences(coordinator)
    found = {
        name: differences([values.get(name, "none") for values in properties], hosts)
        for name in dict.fromkeys(name for values in properties for name in values)
    }
    details = [f"{name}: {'; '.join(texts)}" for name, texts in found.items() if texts]
    advice = [f"install the same version of {name} on all hosts" for name in MUST_BE_EQUAL if found.get(name)]
    has_failed = bool(advice)
    kinds = [name for name, texts in found.items() if texts]
    if skewed := _clock_texts(clocks, hosts):
        kinds.append("clocks")
        details += skewed
        advice.append("synchronize the clocks of all hosts (chrony, NTP)")
    for index, name, parts, remedy in (
        (1, "Rankzero's code", rankzero_code, "install the same version of Rankzero on all hosts"),
        (2, "your code", lambda: code, "use the same files on all hosts"),
        (3, "settings", lambda: settings, "start all ranks with the same flags"),
    ):
        if len({answer[index] for answer in answers if answer}) == 1:
            continue
        different = different_parts(coordinator.all_gather_object(parts()), hosts, ignores_missing=name == "your code")
        if different:
            kinds.append(name)
            advice.append(remedy)
            details += [f"{part}: {'; '.join(texts)}" for part, texts in list(different.items())[:MAX_SHOWN]]
            details += [f"and {len(different) - MAX_SHOWN} more"] * (len(different) > MAX_SHOWN)
            has_failed |= any(not part.startswith("data.") for part in different)

    status = FAIL if has_failed else WARN if details else OK
    equal = ", ".join(f"{name} {properties[0][name]}" for name in MUST_BE_EQUAL) + " on all ranks"
    summary = f"{', '.join(kinds)} differ{'s' * (len(kinds) == 1 and not kinds[0].endswith('s'))} between ranks"
    ranks = [{**values, "clock_ahead": clock} for values, clock in zip(properties, clocks, strict=True)]
    return Check("environment", status, summary if kinds else equal, details, advice, {"ranks": ranks})


def describe_environment(world: WorldInfo) -> dict[str, str]:
    """Returns the properties of this process that are compared, by name."""
    properties = {
        "Python": platform.python_version(),
        "executable": sys.executable,
        "virtual environment": sys.prefix,
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "lightning": lightning.__version__,
        "CUDA": torch.version.cuda or "none",
        "open file limit": _limit(resource.RLIMIT_NOFILE),
        "locked memory limit": _limit(resource.RLIMIT_MEMLOCK),
        **relevant_variables(),
    }
    if world.accelerator == "cuda":
        device = torch.cuda.get_device_properties(world.index)
        properties |= {
            "GPU": f"{device.name}, {device.total_memory / 2**30:.0f} GiB",
            "driver": str(torch._C._cuda_getDriverVersion()),  # type: ignore[attr-defined]
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if world.backend == "nccl" else "none",
        }
    return properties


def different_parts(
    parts: Sequence[Mapping[str, str]], hosts: Sequence[str], ignores_missing: bool
) -> dict[str, list[str]]:
    """Returns which files or settings differ between ranks: name -> description of who has which value.

    Args:
        parts: Name -> digest or value, of each rank.
        hosts: Host of each rank.
        ignores_missing: Whether a name may be missing on some ranks: only rank zero may import a module for logging.
    """
    found = {}
    for name in sorted({name for values in parts for name in values}):
        if ignores_missing and any(name not in values for values in parts):
            continue
        if texts := differences([values.get(name, "missing") for values in parts], hosts):
            found[name] = texts
    return found


def clock_differences(readings: Sequence[tuple[float, float]]) -> list[float]:
    """Returns by how many seconds the clock of each rank is ahead of rank zero's; 0 below `CLOCK_SECONDS`.

    Every rank read its clock before and after an exchange. All first readings precede all last readings. Therefore the
    readings bound the difference between two clocks, however long a rank was delayed.

    Args:
        readings: First and last reading of each rank's clock in seconds.
    """
    first, last = readings[0]
    seconds = []
    for before, after in readings:
        is_certain = before - last > CLOCK_SECONDS or after - first < -CLOCK_SECONDS
        seconds.append(round((before + after - first - last) / 2, 3) if is_certain else 0.0)
    return seconds


def _clock_differences(coordinator: Coordinator) -> list[float]:
    before = time.time()
    coordinator.all_gather_object(None)
    return clock_differences(coordinator.all_gather_object([before, time.time()]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"


def _clock_texts(clocks: Sequence[float], hosts: Sequence[str]) -> list[str]:
    texts: dict[str, str] = {}
    for seconds, host in zip(clocks, hosts, strict=True):
        if seconds:
            direction = "ahead of" if seconds > 0 else "behind"
            texts.setdefault(host, f"the clock of {host} is {abs(seconds):.1f} s {direction} the clock of {hosts[0]}")
    return list(texts.values())
