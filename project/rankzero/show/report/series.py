"""The series that Rankzero logs for every model, in addition to the model's own. Does not import torch."""

from typing import NamedTuple


class Series(NamedTuple):
    """A series of values.

    Args:
        title: Title of its chart, or name of its layer in the chart of the parts of a step.
        description: What the values are, with their unit.
        reduction: How the values of ranks are combined: `mean`, `sum` or `max`. Empty for values of rank zero.
    """

    title: str
    description: str
    reduction: str = ""


FIRST_GRADIENT = "world/first_gradient_ms"
DATA_WAIT = "wall_time/data_wait_ms"
GRADIENT_NORM = "weights/gradient_norm"
MFU = "workload/mfu_percent"
EPOCH, SAMPLES = "x_axis/epoch", "x_axis/samples"

STEP_PARTS = {
    DATA_WAIT: Series(
        "waiting for data", "Milliseconds per step: waiting for a batch and moving it to the device", "mean"
    ),
    "wall_time/forward_ms": Series("forward pass", "Milliseconds per step: forward pass", "mean"),
    "wall_time/backward_ms": Series(
        "backward pass", "Milliseconds per step: backward pass, without exposed communication", "mean"
    ),
    "wall_time/exposed_communication_ms": Series(
        "communication", "Milliseconds per step: waiting for gradients of other ranks after the backward pass", "mean"
    ),
    "wall_time/optimizer_ms": Series("optimizer", "Milliseconds per step: optimizer", "mean"),
    "wall_time/other_ms": Series("other", "Milliseconds per step: hooks, callbacks, logging", "mean"),
}
"""The parts of a step, from the bottom of the chart."""

SERIES = {
    "train/loss": Series("loss", "Mean loss of all samples of the interval, over all ranks"),
    "train/lr": Series("learning rate", "Learning rate"),
    "train/samples_per_second": Series("speed", "Training samples per second over all ranks, without validation"),
    **STEP_PARTS,
    "wall_time/step_ms": Series("step", "Milliseconds per step, without validation and checkpoints", "mean"),
    "wall_time/checkpoint_blocked_s": Series(
        "training blocked by saves", "Seconds of the interval in which saving blocked training", "max"
    ),
    "wall_time/checkpoint_s": Series(
        "time to save a checkpoint", "Seconds from the copy of the last checkpoint until it was on disk"
    ),
    GRADIENT_NORM: Series(
        "gradient norm", "2-norm of all gradients before clipping, in the last step of the interval", "max"
    ),
    "workload/samples_per_second_per_device": Series(
        "speed per device", "Training samples per second and device, without validation"
    ),
    "workload/teraflops_per_second": Series(
        "compute speed per device",
        "TFLOP/s of a device: 10^12 floating-point operations of forward and backward passes per second",
    ),
    MFU: Series("model FLOP/s utilization", "Model FLOP/s utilization: percentage of the published peak of the device"),
    "workload/device_memory_gib": Series(
        "device memory", "GiB of device memory in use, largest amount since the start", "max"
    ),
    "workload/host_memory_gib": Series(
        "host memory of a rank", "GiB of host memory of a rank's process; the largest of all ranks", "max"
    ),
    "workload/loader_queue_batches": Series(
        "prepared batches of a rank", "Batches that the loader processes of a rank hold ready", "mean"
    ),
    "workload/checkpoint_mib": Series("checkpoint size", "MiB of the last checkpoint"),
    FIRST_GRADIENT: Series(
        "time to the first gradient", "Milliseconds from the start of a step to its first gradient, by rank", "max"
    ),
    "world/data_wait_ms": Series("waiting for data", "Milliseconds per step: waiting for a batch, by rank"),
    EPOCH: Series("epochs", "Epochs that are done, with the fraction of the current one"),
    SAMPLES: Series("samples", "Training samples of all attempts and ranks"),
    "x_axis/attempt": Series("attempt", "Number of the attempt, from 1"),
}
"""Tag -> series. TensorBoard shows the groups in alphabetical order, those of the model (`train`, `val`) first."""
