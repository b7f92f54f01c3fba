"""Checks the GPUs of all hosts and finds the connection between them; limits how long NCCL may take."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.scheduler.query import run_program
from rankzero.distributed.world import World
from rankzero.preflight.check import OK, SKIPPED, WARN, Check, check_on_rank_zero, gather

T = TypeVar("T")

INFINIBAND = Path("/sys/class/infiniband")

SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's reasons for a low clock that are faults; an idle GPU and limits set by an administrator are none."""

CONTEXT_MIB = 2048
"""A process may use this much memory of a GPU besides torch's allocator: CUDA's context, libraries and NCCL."""

INFINIBAND_SHARE, NVLINK_SHARE = 1 / 4, 1 / 8
"""An all-reduce below this share of one port, or of all NVLinks of a GPU, probably uses TCP or the host's memory.

Not all GPUs of a host need to be connected by all of their NVLinks.
"""


class Link(NamedTuple):
    """The connection between GPUs that NCCL should use, named such as `NVLink of 3,825 Gbit/s`.

    Below a bus bandwidth of `least_gbps` Gbit/s, NCCL probably uses another connection.
    """

    name: str
    least_gbps: float


def check_gpus(coordinator: Coordinator, world: World) -> tuple[Check, Link | None]:
    """Checks memory errors, slowdowns and foreign processes; returns the link between the GPUs. All ranks must call."""
    if world.accelerator != "cuda":
        return Check("GPUs", SKIPPED, f"the run uses {world.accelerator}"), None
    uuid = str(torch.cuda.get_device_properties(world.index).uuid)
    own: dict[str, Any] = {"uuid": uuid, "reserved": torch.cuda.memory_reserved(world.index) >> 20}
    if coordinator.world.local_rank == 0 or torch.cuda.device_count() == 1:  # others may be hidden
        own |= {"gpus": query_gpus(), "nvlink": nvlink_gbps(), "infiniband": infiniband_gbps()}
    links: list[Link | None] = []

    def check(ranks: list[dict[str, Any]]) -> Check:
        links.append(_link([values for values in ranks if "gpus" in values], world))
        return _check_rows(ranks, coordinator.world.hosts)

    found = check_on_rank_zero(coordinator, own, check)
    link = coordinator.broadcast_object(links[0] if links else None)
    return found, Link(*link) if link else None


def _check_rows(ranks: Sequence[dict[str, Any]], hosts: Sequence[str]) -> Check:
    details: list[str] = []
    advice: dict[str, None] = {}
    rows_of: dict[tuple[str, str], list[str]] = {}
    first_rank: dict[tuple[str, str], int] = {}
    expected_mib: Counter[tuple[str, str]] = Counter()
    for rank, (host, values) in enumerate(zip(hosts, ranks, strict=True)):
        rows_of |= {(host, uuid): row for uuid, row in values.get("gpus", {}).items()}
        first_rank.setdefault((host, values["uuid"]), rank)
        expected_mib[host, values["uuid"]] += values["reserved"] + CONTEXT_MIB
    seen = {gpu: rows_of[gpu] for gpu in first_rank if gpu in rows_of}
    for (host, uuid), row in seen.items():
        name = f"the GPU of rank {first_rank[host, uuid]} on {host}"
        used, errors, reasons = map(_number, row)
        if errors:
            details.append(f"{name} has had {errors} uncorrectable memory errors (ECC)")
            advice[f"reset or replace the GPUs of {host} with memory errors, or start the job without this host"] = None
        if slow := [text for bit, text in SLOWDOWNS.items() if reasons & bit]:
            details.append(f"{name} runs at a low clock: {', '.join(slow)}")
            advice[f"check cooling and power of {host}, or start the job without this host"] = None
        if used > expected_mib[host, uuid]:
            details.append(f"other processes use {name}: {used / 1024:.0f} GiB of its memory are in use")
            advice[f"end the other processes on the GPUs of {host}; nvidia-smi lists them"] = None
    if not seen:
        return Check("GPUs", SKIPPED, f"nvidia-smi on {hosts[0]} does not show the GPUs of the run")
    summary = f"{len(seen)} GPU{'s' * (len(seen) > 1)} without memory errors, slowdowns and other processes"
    summary = "some GPUs have memory errors, slowdowns or other processes" if details else summary
    rows = [{"host": host, "uuid": uuid, "values": row} for (host, uuid), row in seen.items()]
    return Check("GPUs", WARN if details else OK, summary, details, list(advice), {"gpus": rows})


def _link(nodes: Sequence[dict[str, Any]], world: World) -> Link | None:
    """Returns the link that the first ranks of all nodes have found; None if there is none, or without NCCL."""
    kind, share = ("infiniband", INFINIBAND_SHARE) if world.nodes > 1 else ("nvlink", NVLINK_SHARE)
    gbps = min(float(values[kind]) for values in nodes)
    if world.backend != "nccl" or world.size == 1 or not gbps:
        return None
    name = "InfiniBand or RoCE" if kind == "infiniband" else "NVLink"
    return Link(f"{name} of {gbps:,.0f} Gbit/s", gbps * share)


def query_gpus() -> dict[str, list[str]]:
    """Returns used memory (MiB), uncorrectable errors and reasons of a low clock of each GPU, by UUID."""
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the name before driver 535
        fields = f"uuid,memory.used,ecc.errors.uncorrected.volatile.total,{reasons}.active"
        answer = run_program("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
        if answer.ok:
            rows = [[cell.strip() for cell in line.split(",")] for line in answer.text.splitlines()]
            return {row[0].removeprefix("GPU-"): row[1:] for row in rows if len(row) == 4}
    return {}


def _number(text: str) -> int:
    """Returns a number of nvidia-smi, which writes `[N/A]` for what a GPU does not have; 0 for that."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def nvlink_gbps() -> float:
    """Returns the bandwidth in Gbit/s of all NVLinks of the GPU that has most; 0 without NVLink."""
    answer = run_program("nvidia-smi", "nvlink", "--status")
    gpus = answer.text.split("UUID: ") if answer.ok else []
    return 8 * max((sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", gpu))) for gpu in gpus), default=0.0)


def infiniband_gbps() -> float:
    """Returns the bandwidth in Gbit/s of the fastest active port of InfiniBand or RoCE; 0 without one."""
    try:
        ports = [(port / "rate", (port / "state").read_text()) for port in INFINIBAND.glob("*/ports/*")]
        return max((float(rate.read_text().split()[0]) for rate, state in ports if "ACTIVE" in state), default=0.0)
    except (OSError, ValueError):
        return 0.0


def gather_in_time(
    coordinator: Coordinator, work: Callable[[], T], device: torch.device, seconds: float
) -> tuple[list[T | None], dict[int, str]]:
    """Is `gather` for work that communicates; on a GPU, the work itself has a time limit too. All ranks must call.

    NCCL connects within its calls, and waits forever for a rank that cannot be reached. Such a call stays in its
    thread; NCCL must not be used afterwards. `seconds` is how long the work may take on a GPU, and how much longer the
    other ranks may.
    """
    if device.type != "cuda":
        return gather(coordinator, work, seconds)
    future = Future[T]()

    def run() -> None:
        try:
            torch.cuda.set_device(device)  # of this thread
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def call() -> T:
        threading.Thread(target=run, name="nccl", daemon=True).start()
        if not wait([future], seconds).done:
            raise TimeoutError(f"NCCL did not finish within {seconds:g} s")
        return future.result()

    return gather(coordinator, call, 2 * seconds)
