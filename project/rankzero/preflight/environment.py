"""Checks that all ranks run the same code in the same environment."""

import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning
import torch

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.relevant_variables import relevant_variables
from rankzero.preflight.check import FAIL, OK, WARN, Check, differences, error_lines, gather
from rankzero.preflight.code import combined, rankzero_code, rankzero_digest, user_code
from rankzero.runs.reports.secrets import HIDDEN, without_secrets

MUST_BE_EQUAL = ("Python", "torch", "lightning")
"""Packages whose versions must be equal on all ranks; differences in other properties are warnings."""

MAY_DIFFER = (
    *("logger", "callbacks", "profiler", "enable_progress_bar", "enable_model_summary", "log_every_n_steps"),
    *("root", "default_root_dir", "devices", "start_timeout", "json", "seed", "seed_everything"),
)
"""Settings that may differ between ranks.

A script may log on rank zero only, and hosts may have other folders and numbers of devices. The order of samples uses
rank zero's seed.
"""

DECISIVE = (
    *("batch_size", "global_batch_size", "max_device_batch_size", "accumulate_grad_batches", "fast"),
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "overfit_batches", "limit_train_batches"),
    *("limit_val_batches", "num_sanity_val_steps", "val_check_interval", "check_val_every_n_epoch", "save_every"),
    *("precision", "strategy", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm", "num_nodes"),
)
"""Settings that decide, besides those of the model, which steps and collectives a rank runs; they must be equal."""

CLOCK_SECONDS = 1.0
"""Differences between clocks above this number of seconds are reported."""

MAX_SHOWN = 5
"""How many different files or settings are shown."""


def check_environment(coordinator: Coordinator, world: WorldInfo, config: Mapping[str, Any]) -> Check:
    """Compares versions, code, settings, limits and clocks of all ranks. All ranks must call.

    Args:
        coordinator: Exchanges values between all ranks.
        world: The devices of all processes.
        config: The settings of the run: name, such as `trainer.max_epochs`, -> value.
    """
    hosts = coordinator.hosts
    settings = {name: str(value) for name, value in config.items() if _setting(name).split(".")[0] not in MAY_DIFFER}
    code: dict[str, str] = {}

    def describe() -> list[Any]:
        code.update(user_code())
        return [describe_environment(world), rankzero_digest(), combined(code), combined(settings)]

    answers, errors = gather(coordinator, describe)
    if errors:
        summary, advice = "a rank cannot describe its environment", ["correct the error shown above"]
        return Check("environment", FAIL, summary, error_lines(errors, hosts), advice)
    properties: list[dict[str, str]] = [answer[0] for answer in answers if answer]
    found = different_parts(properties, hosts)
    details = [f"{name}: {'; '.join(texts)}" for name, texts in found.items()]
    advice = [f"install the same version of {name} on all hosts" for name in MUST_BE_EQUAL if name in found]
    kinds, has_failed = list(found), bool(advice)
    clocks = _clock_differences(coordinator)
    if skewed := _clock_texts(clocks, hosts):
        kinds.append("clocks")
        details += skewed
        advice.append("synchronize the clocks of all hosts (chrony, NTP)")
    comparisons: tuple[tuple[str, str, Callable[[], dict[str, str]]], ...] = (
        ("Rankzero's code", "install the same version of Rankzero on all hosts", rankzero_code),
        ("your code", "use the same files on all hosts", lambda: code),
        ("settings", "start all ranks with the same flags", lambda: settings),
    )
    for position, (name, remedy, parts) in enumerate(comparisons, 1):
        parts_of_ranks = _gather_by_digest(coordinator, [answer[position] for answer in answers if answer], parts)
        # Only some ranks may import a module, for example for logging.
        different = different_parts(parts_of_ranks, hosts, ignores_missing=name == "your code")
        if not different:
            continue
        kinds.append(name)
        advice.append(remedy)
        shown = different
        if name == "settings":
            shown = different_parts([without_secrets(values) for values in parts_of_ranks], hosts)
        for part in list(different)[:MAX_SHOWN]:
            details.append(f"{part}: {'; '.join(shown.get(part) or [f'{HIDDEN} (different secrets)'])}")
        details += [f"and {len(different) - MAX_SHOWN} more"] * (len(different) > MAX_SHOWN)
        has_failed |= name != "settings" or any(is_decisive(part, texts) for part, texts in different.items())

    status = FAIL if has_failed else WARN if details else OK
    equal = ", ".join(f"{name} {properties[0][name]}" for name in MUST_BE_EQUAL) + " on all ranks"
    summary = f"{', '.join(kinds)} differ{'s' * (len(kinds) == 1 and not kinds[0].endswith('s'))} between ranks"
    ranks = [{**values, "clock_ahead": clock} for values, clock in zip(properties, clocks, strict=True)]
    return Check("environment", status, summary if kinds else equal, details, advice, {"ranks": ranks})


def is_decisive(name: str, texts: Sequence[str]) -> bool:
    """Whether a setting must be equal on all ranks.

    Args:
        name: Name of the setting, such as `trainer.max_epochs`.
        texts: Its values. Paths may differ between hosts.
    """
    has_paths = any(text.startswith(("/", "~", "./", "../")) for text in texts)
    return not has_paths and (name.startswith("model.") or _setting(name) in DECISIVE)


def _setting(name: str) -> str:
    return name.removeprefix("trainer.")


def _gather_by_digest(
    coordinator: Coordinator, digests: Sequence[str], parts: Callable[[], dict[str, str]]
) -> list[dict[str, str]]:
    """Returns the parts of each rank, of which one rank per digest sends them; [] if all digests are equal."""
    if len(set(digests)) == 1:
        return []
    is_first = digests.index(digests[coordinator.launch.rank or 0]) == (coordinator.launch.rank or 0)
    sent = coordinator.all_gather_object(parts() if is_first else None)
    return [sent[digests.index(digest)] for digest in digests]


def describe_environment(world: WorldInfo) -> dict[str, str]:
    """Returns the properties of this process that are compared, by name."""
    properties = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Python patch level": platform.python_version(),
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
    parts: Sequence[Mapping[str, str]], hosts: Sequence[str], ignores_missing: bool = False
) -> dict[str, list[str]]:
    """Returns which properties differ between ranks: name -> description of who has which value.

    Args:
        parts: Name -> value, of each rank.
        hosts: Host of each rank.
        ignores_missing: Whether a name that some ranks do not have is no difference.
    """
    found = {}
    for name in dict.fromkeys(name for values in parts for name in values):
        if ignores_missing and any(name not in values for values in parts):
            continue
        if texts := differences([values.get(name, "none") for values in parts], hosts):
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
    coordinator.broadcast_object(None)
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
