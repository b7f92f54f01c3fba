"""The flags of all commands. Does not import torch."""

from rankzero.cli.flags.flag import Flag
from rankzero.cli.flags.values import (
    choice,
    file_path,
    hostname,
    non_negative_int,
    port_number,
    positive_int,
    yes_or_no,
)
from rankzero.distributed.environments.launchers import LAUNCHERS

COMMON_FLAGS = (
    Flag(
        "nodes", "N", positive_int, "use N machines [from the launcher, or 1]", "2", lightning_key="trainer.num_nodes"
    ),
    Flag(
        "devices",
        "N",
        positive_int,
        "run N processes per machine [from the launcher, or one per GPU, or 1]",
        "2",
        lightning_key="trainer.devices",
    ),
    Flag(
        "launcher",
        "NAME",
        choice("auto", *LAUNCHERS),
        f"override the detected launcher: {', '.join(LAUNCHERS)} [auto]",
        "auto",
        default="auto",
    ),
    Flag("node_rank", "R", non_negative_int, "set this machine's number, from 0, without a launcher [none]", "0"),
    Flag("master_addr", "HOST", hostname, "rendezvous at HOST, the machine of rank 0 [from the launcher]", "node1"),
    Flag("master_port", "PORT", port_number, "rendezvous on this port of HOST [from the launcher]", "29500"),
    Flag(
        "interface",
        "NAME",
        hostname,
        "communicate over this interface [gloo: the one to --master_addr; nccl: its own choice]",
        "eth0",
    ),
    Flag(
        "start_timeout",
        "SEC",
        positive_int,
        "wait at most SEC seconds for all processes, and for slow ones at the start [300; none]",
        "60",
    ),
    Flag(
        "auth",
        "HOW",
        choice("auto", "required"),
        "auto: report it if the ranks do not share a key; required: refuse to start then [auto]",
        "required",
        default="auto",
    ),
    Flag(
        "backend",
        "NAME",
        choice("nccl", "gloo"),
        "communicate by nccl or gloo [nccl if each process has its own GPU, else gloo]",
        "gloo",
    ),
    Flag(
        "accelerator",
        "NAME",
        choice("auto", "cpu", "gpu", "cuda", "mps"),
        "compute on cpu, gpu, cuda or mps [auto: a GPU if there is one]",
        "cpu",
        lightning_key="trainer.accelerator",
    ),
    Flag(
        "precision",
        "P",
        choice("32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true"),
        "compute in 32, 64, 16-mixed, bf16-mixed, 16-true or bf16-true [32]",
        "bf16-mixed",
        lightning_key="trainer.precision",
    ),
    Flag("batch_size", "N", positive_int, "use N samples per step on each device [the data module's number]", "32"),
    Flag(
        "global_batch_size",
        "N",
        positive_int,
        "use N samples per step over all devices [--batch_size x devices; kept on resume]",
        "128",
    ),
    Flag(
        "max_device_batch_size",
        "N",
        positive_int,
        "accumulate gradients over micro-batches of at most N samples per device [no limit]",
        "32",
    ),
    Flag(
        "quiet",
        "[yes]",
        yes_or_no,
        "print only the result, warnings and errors: no progress, no line at the start [no]",
        "yes",
        default="no",
        bare_value="yes",
    ),
    Flag("root", "DIR", file_path, "keep runs in DIR [runs]", "runs", default="runs"),
)
