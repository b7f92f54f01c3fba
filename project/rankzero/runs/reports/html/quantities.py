"""What the tags of TensorBoard measure: titles, units and order of charts. Does not import torch."""

import re

STEP_PARTS = {
    "wall_time/data_wait_ms": "waiting for data",
    "wall_time/forward_ms": "forward pass",
    "wall_time/backward_ms": "backward pass",
    "wall_time/exposed_communication_ms": "communication",
    "wall_time/optimizer_ms": "optimizer",
    "wall_time/other_ms": "other",
}
"""Tag -> name of each part of a step, from the bottom of the chart."""

TITLES = {
    "lr": "learning rate",
    "samples_per_second": "speed",
    "weights/gradient_norm": "gradient norm",
    "workload/teraflops_per_second": "compute speed per device",
    "workload/mfu_percent": "model FLOP/s utilization",
    "workload/samples_per_second_per_device": "speed per device",
    "workload/device_memory_gib": "device memory",
    "workload/host_memory_gib": "host memory of a rank",
    "workload/loader_queue_batches": "prepared batches of a rank",
    "workload/checkpoint_mib": "checkpoint size",
    "wall_time/checkpoint_s": "time to save a checkpoint",
    "wall_time/checkpoint_blocked_s": "training blocked by saves",
    "world/first_gradient_ms": "time to the first gradient",
    "world/data_wait_ms": "waiting for data",
}
"""Quantity -> title of its chart; other quantities are titles themselves."""

UNITS = {
    "samples_per_second": "samples/s",
    "samples_per_second_per_device": "samples/s",
    "teraflops_per_second": "TFLOP/s",
    "percent": "%",
    "gib": "GiB",
    "mib": "MiB",
    "ms": "ms",
    "s": "s",
    "batches": "batches",
}
"""End of a quantity's name -> its unit."""

MEASURED = ("wall_time/", "workload/", "weights/", "world/", "x_axis/")

_SPLIT = re.compile(r"^(train|training|val|valid|validation|test)[/_.-](?=.)")
_VARIANT = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")


def is_hidden(tag: str) -> bool:
    """Returns whether a tag gets no line of its own: axes, parts of a step, copies of other values."""
    is_part = tag in STEP_PARTS or tag == "wall_time/step_ms"
    return is_part or tag in ("epoch", "hp_metric") or tag.startswith(("x_axis/", "world/"))


def quantity_of(tag: str) -> str:
    """Returns what a tag measures: `val/loss_epoch/dataloader_idx_0` -> `loss`."""
    if tag.startswith(MEASURED):
        return tag
    name = _VARIANT.sub("", _SPLIT.sub("", tag), count=1) or tag
    return "loss" if name == "mean_loss" else "lr" if re.fullmatch(r"lr-\d+", name) else name


def chart_order(quantity: str) -> tuple[int, str]:
    """Returns the sort key of a chart: the loss first, then the metrics, then learning rate, speed and gradients."""
    last = ("lr", "samples_per_second", "weights/gradient_norm")
    rank = last.index(quantity) + 2 if quantity in last else 0 if quantity == "loss" else 1
    return rank, quantity


def unit_of(quantity: str) -> str:
    """Returns the unit of a quantity, or an empty string if it is unknown or there is none."""
    return next((unit for end, unit in UNITS.items() if re.search(rf"(^|[_/]){end}$", quantity)), "")


def may_be_logarithmic(quantity: str) -> bool:
    """Returns whether a logarithmic scale suits a quantity whose values differ by orders of magnitude."""
    return any(word in quantity for word in ("loss", "norm", "perplexity"))
