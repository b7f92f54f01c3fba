"""Checks the processes, and that all of them run the same code in the same environment."""

import hashlib
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import torch

import rankzero
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.environments.launch_problems import launch_problems, relevant_variables
from rankzero.distributed.monitoring.hangs import describe_ranks
from rankzero.distributed.process.system import usable_cores
from rankzero.distributed.process.user_traceback import is_user_file
from rankzero.distributed.world import World
from rankzero.messages import is_in_package
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN, Check, attempt, check_on_rank_zero, failure
from rankzero.runs.secrets import HIDDEN, without_secrets
from rankzero.sampling.fingerprint import differing

MAX_LISTED = 64
"""How many processes are printed; the JSON file has all."""

SLOW_IMPORT_SECONDS = 20.0


def check_launcher(coordinator: Coordinator, world: World) -> Check:
    """Reports the detected launcher, and threads and cores per rank. All ranks must call."""
    launch, hosts, gpus = coordinator.world.launch, coordinator.world.hosts, torch.cuda.device_count()
    hides_gpus = world.accelerator == "cuda" and gpus == 1 and world.devices > 1 and not world.shares_gpu
    uses_gloo = world.backend == "gloo" and world.size > 1
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = {
        "threads": torch.get_num_threads(),
        "cores": len(usable_cores()),
        "machine_cpus": os.cpu_count() or 1,
        "visible_gpus": gpus,
        "problems": [problem._asdict() for problem in launch_problems(launch, cpus, hides_gpus, uses_gloo)],
    }

    def check(ranks: list[dict[str, Any]]) -> Check:
        ranks_with: dict[str, list[int]] = {}
        problems = [{**found, "rank": rank} for rank, values in enumerate(ranks) for found in values["problems"]]
        for found in problems:
            ranks_with.setdefault(found["problem"], []).append(found["rank"])
        details = [f"{problem}: {describe_ranks(affected, hosts)}" for problem, affected in ranks_with.items()]
        status = FAIL if any(found["ends_run"] for found in problems) else WARN if problems else OK
        threads = sorted({values["threads"] for values in ranks})
        cores = sorted({values["cores"] for values in ranks})
        summary = (
            f"{launch.launcher} ({launch.evidence}): {launch.shape} on {world.accelerator}, "
            f"{_range(threads, 'thread')} and {_range(cores, 'core')} per rank"
        )
        advice = list(dict.fromkeys(found["advice"] for found in problems))
        values = {"launcher": launch.launcher, "variables": dict(launch.variables), "ranks": ranks}
        return Check("launcher", status, summary, details, advice, values)

    return check_on_rank_zero(coordinator, own, check)


def check_processes(coordinator: Coordinator, world: World, seconds: float | None) -> Check:
    """Lists host, rank, local rank, device and process id of every process. All ranks must call.

    If a process is missing, the rendezvous has already failed and named it.
    """
    device = f"{world.accelerator}:{world.index}" if world.accelerator == "cuda" else world.accelerator
    devices = coordinator.decide(device, list)
    rows = [
        {"rank": member.rank, "host": member.host, "local_rank": member.local_rank, "device": device, "pid": member.pid}
        for member, device in zip(coordinator.world.peers.values(), devices, strict=True)
    ]
    text = "rank {rank} on {host}, local rank {local_rank}, {device}, process {pid}"
    lines = [text.format(**row) for row in rows[:MAX_LISTED]]
    lines += [f"and {len(rows) - MAX_LISTED} more"] * (len(rows) > MAX_LISTED)
    count, hosts = len(rows), len(set(coordinator.world.hosts))
    summary = f"all {count} processes on {hosts} host{'s' * (hosts > 1)} have connected"
    if seconds is not None:
        summary += f", after {seconds:.1f} s"
    if count == 1:
        summary = f"one process on {rows[0]['host']}"
    return Check("rendezvous", OK, summary, lines, values={"ranks": rows, "seconds": seconds})


def check_imports(coordinator: Coordinator, seconds: float | None) -> Check:
    """Reports how long each rank took to import torch. All ranks must call."""
    if seconds is None:
        return Check("imports", SKIPPED, "torch was imported before the checks")
    times: list[float] = coordinator.decide(round(seconds, 2), list)
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    slowest_rank = f"rank {slowest} on {coordinator.world.hosts[slowest]}"
    summary = f"torch was imported within {times[slowest]:.1f} s (the slowest: {slowest_rank})"
    is_slow = times[slowest] > SLOW_IMPORT_SECONDS
    advice = (
        "a shared file system that serves thousands of small files is slow when its cache is cold: copy the virtual "
        "environment to a local disk of each node, or use a container image or squashfs file"
    )
    return Check("imports", WARN if is_slow else OK, summary, (), [advice] * is_slow, {"seconds": times})


def _range(numbers: list[int], noun: str) -> str:
    text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {noun}{'s' * (numbers[-1] > 1)}"


MAX_FILES = 2000
"""How many of the user's files are compared."""


def user_code() -> dict[str, str]:
    """Returns the digest of the source file of each imported module outside of libraries, by module name.

    The included models and data modules count as the user's code. At most `MAX_FILES` files are read.
    """
    sources = {name: _source_of(module) for name, module in sorted(sys.modules.items())}
    own = [(name, file) for name, file in sources.items() if _is_compared(file)]
    return digests(dict(own[:MAX_FILES]))


def _source_of(module: object) -> Path:
    """Returns the source file of a module without loading a lazy module; an empty path if it has none."""
    if not issubclass(type(module), ModuleType):  # an object of cffi states ModuleType as its class
        return Path()
    return Path(str(object.__getattribute__(module, "__dict__").get("__file__") or ""))


def _is_compared(file: Path) -> bool:
    """Whether a file is Python source of the user. An installed command has no suffix: it names its environment."""
    if file.suffix != ".py":
        return False
    return is_in_package(file, "lightning_modules", "data_modules") or is_user_file(str(file))


def rankzero_code() -> dict[str, str]:
    """Returns the digest of each source file of the package `rankzero`, by path."""
    folder = Path(str(rankzero.__file__)).parent
    return digests({f"rankzero/{file.relative_to(folder)}": file for file in folder.rglob("*.py")})


@cache
def rankzero_digest() -> str:
    """Returns one digest of `rankzero_code`, which is computed once per process."""
    return combined(rankzero_code())


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Returns the first 12 digits of the sha256 of each file; files that cannot be read are left out."""
    found = {}
    for name, file in files.items():
        with suppress(OSError):
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return found


def combined(parts: Mapping[str, str]) -> str:
    """Returns one digest of several."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:12]


NVIDIA_DRIVER_VERSION = Path("/sys/module/nvidia/version")

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
    *("batch_size", "global_batch_size", "max_device_batch_size", "accumulate_grad_batches", "fast", "compile"),
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "overfit_batches", "limit_train_batches"),
    *("limit_val_batches", "num_sanity_val_steps", "val_check_interval", "check_val_every_n_epoch", "save_every"),
    *("precision", "strategy", "gradient_clip_val", "gradient_clip_algorithm", "sync_batchnorm", "num_nodes"),
)
"""Settings that decide, besides those of the model, which steps and collectives a rank runs; they must be equal."""

CLOCK_SECONDS = 1.0
"""Differences between clocks above this number of seconds are reported."""

MAX_SHOWN = 5
"""How many different files or settings are shown."""


def check_environment(
    coordinator: Coordinator, world: World, config: Mapping[str, Any], parameters: Mapping[str, str]
) -> Check:
    """Compares versions, code, settings, models, limits and clocks of all ranks. All ranks must call."""
    settings = {name: str(value) for name, value in config.items() if _setting(name).split(".")[0] not in MAY_DIFFER}
    code: dict[str, str] = {}

    def describe() -> list[Any]:
        code.update(user_code())
        digests = [rankzero_digest(), *map(combined, (code, settings, parameters))]
        return [describe_environment(world), *digests]

    own, error, interrupt = attempt(describe)
    # Values of all ranks; filled on rank zero only.
    answers: list[Any] = []
    clocks: list[Any] = []
    sent: list[Any] = []

    def receive(values: list[Any]) -> list[list[int]] | None:
        answers.extend(values)
        return _first_ranks(values)

    differing_ranks = coordinator.decide([own, error], receive)
    if interrupt:
        raise interrupt
    if differing_ranks is not None:
        before = time.time()
        coordinator.decide(None, lambda values: None)
        coordinator.decide([before, time.time()], clocks.extend)
    if any(differing_ranks or ()):
        parts: list[Callable[[], Any]] = [rankzero_code, lambda: code, lambda: settings, lambda: parameters]
        is_sent = (coordinator.world.rank in ranks for ranks in differing_ranks)
        coordinator.decide([part() if sends else None for part, sends in zip(parts, is_sent, strict=True)], sent.extend)
    return check_on_rank_zero(coordinator, None, lambda _: _compare(coordinator.world.hosts, answers, clocks, sent))


COMPARISONS = (
    ("Rankzero's code", "install the same version of Rankzero on all hosts"),
    ("your code", "use the same files on all hosts"),
    ("settings", "start all ranks with the same flags"),
    ("the model's parameters", "build the same model on all ranks"),
)
"""What is compared by digest, and what to do if it differs."""


def _first_ranks(answers: list[Any]) -> list[list[int]] | None:
    """Returns the first rank with each digest, for each comparison; an empty list if all digests are equal.

    None if a rank has failed.
    """
    if any(error for _, error in answers):
        return None
    digests_of_ranks = zip(*(own[1:] for own, _ in answers), strict=True)
    return [sorted(map(ranks.index, set(ranks))) if len(set(ranks)) > 1 else [] for ranks in digests_of_ranks]


def _compare(hosts: Sequence[str], answers: list[Any], clocks: list[Any], sent: list[Any]) -> Check:
    """Compares all ranks: properties, digests and error of each, two readings of its clock, and what it has sent."""
    if errors := {rank: error for rank, (_, error) in enumerate(answers) if error}:
        return failure("environment", "a rank cannot describe its environment", errors, hosts)
    properties = [own[0] for own, _ in answers]
    found = differing(properties, hosts)
    details = [f"{name}: {'; '.join(texts)}" for name, texts in found.items()]
    advice = [f"install the same version of {name} on all hosts" for name in MUST_BE_EQUAL if name in found]
    kinds, has_failed = list(found), bool(advice)
    clocks_ahead = clock_differences(clocks)
    if skewed := _clock_texts(clocks_ahead, hosts):
        kinds.append("clocks")
        details += skewed
        advice.append("synchronize the clocks of all hosts (chrony, NTP)")
    for position, (name, remedy) in enumerate(COMPARISONS):
        digests = [own[position + 1] for own, _ in answers]
        if len(set(digests)) == 1:
            continue
        parts = [sent[digests.index(digest)][position] for digest in digests]
        # Only some ranks may import a module, for example for logging.
        different = differing(parts, hosts, ignores_missing=name == "your code")
        if different:
            kinds.append(name)
            advice.append(remedy)
            shown = differing(list(map(without_secrets, parts)), hosts) if name == "settings" else different
            for part in list(different)[:MAX_SHOWN]:
                details.append(f"{part}: {'; '.join(shown.get(part) or [f'{HIDDEN} (different secrets)'])}")
            details += [f"and {len(different) - MAX_SHOWN} more"] * (len(different) > MAX_SHOWN)
            has_failed |= name != "settings" or any(_is_decisive(part, texts) for part, texts in different.items())
    status = FAIL if has_failed else WARN if details else OK
    equal = ", ".join(f"{name} {properties[0][name]}" for name in MUST_BE_EQUAL) + " on all ranks"
    summary = f"{', '.join(kinds)} differ{'s' * (len(kinds) == 1 and not kinds[0].endswith('s'))} between ranks"
    ranks = [{**values, "clock_ahead": ahead} for values, ahead in zip(properties, clocks_ahead, strict=True)]
    return Check("environment", status, summary if kinds else equal, details, advice, {"ranks": ranks})


def _is_decisive(name: str, texts: Sequence[str]) -> bool:
    """Returns whether a setting must be equal on all ranks. Paths may differ between hosts."""
    has_paths = any(text.startswith(("/", "~", "./", "../")) for text in texts)
    return not has_paths and (name.startswith("model.") or _setting(name) in DECISIVE)


def _setting(name: str) -> str:
    return name.removeprefix("trainer.")


def describe_environment(world: World) -> dict[str, str]:
    """Returns the properties of this process that are compared, by name."""
    torchvision, driver = "not installed", "unknown"
    with suppress(PackageNotFoundError):
        torchvision = version("torchvision")
    with suppress(OSError):  # WSL, and some kernels, do not show the version of the driver
        driver = NVIDIA_DRIVER_VERSION.read_text().strip()
    properties = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Python patch level": platform.python_version(),
        "executable": sys.executable,
        "virtual environment": sys.prefix,
        "torch": torch.__version__,
        "torchvision": torchvision,
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
            "driver": driver,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if world.backend == "nccl" else "none",
        }
    return properties


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
