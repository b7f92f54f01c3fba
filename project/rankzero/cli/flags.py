"""The short flags of the commands. Does not import torch.

A flag with a `lightning_key` is another name for a LightningCLI key (`--epochs` is `--trainer.max_epochs`), both in
YAML and on the command line. `rankzero.cli.lightning_cli` adds all other flags to LightningCLI.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from rankzero.cli.flag_values import (
    checkpoint_of,
    choice,
    choices,
    export_file,
    file_path,
    hostname,
    metric_to_keep,
    non_negative_int,
    port_number,
    positive_int,
    resume_from,
    run_name,
    save_interval,
    seed_value,
    time_limit_value,
    yes_or_no,
)
from rankzero.distributed.environments.launchers import LAUNCHERS
from rankzero.messages import RequestError, nearest


class Flag(NamedTuple):
    """One short flag.

    Args:
        name: Name without dashes.
        metavar: Placeholder for the value in the help.
        read: Reads the value from text, or raises a ValueError that describes valid values.
        help: Description in one line.
        example: A valid value, for error messages.
        lightning_key: LightningCLI key that has the same meaning, if any.
        aliases: Further names.
        default: Value without the flag.
    """

    name: str
    metavar: str
    read: Callable[[str], Any]
    help: str
    example: str
    lightning_key: str | None = None
    aliases: tuple[str, ...] = ()
    default: Any = None

    def value(self, text: str) -> Any:
        """Reads the value.

        Raises:
            RequestError: The value is invalid.
        """
        try:
            return self.read(text)
        except ValueError as error:
            near = nearest(text, str(error).removeprefix("one of ").split(", ")) if "one of" in str(error) else None
            raise RequestError(
                f"--{self.name} {text}", f"{text!r} is not {error}", f"--{self.name} {near or self.example}"
            ) from None


RUNNING = (
    Flag("nodes", "N", positive_int, "machines", "2", lightning_key="trainer.num_nodes"),
    Flag(
        "devices",
        "N",
        positive_int,
        "processes a machine, each on a GPU or on the CPU",
        "2",
        lightning_key="trainer.devices",
    ),
    Flag(
        "launcher",
        "NAME",
        choice("auto", *LAUNCHERS),
        f"auto (decided from evidence), {', '.join(LAUNCHERS)}",
        "auto",
        default="auto",
    ),
    Flag("node_rank", "R", non_negative_int, "machines joined by hand: which one this is, from 0", "0"),
    Flag("master_addr", "HOST", hostname, "where all meet: the machine of rank 0", "node1"),
    Flag("master_port", "PORT", port_number, "the port at which they meet there", "29500"),
    Flag("interface", "NAME", hostname, "the network interface to use; left out: the one that leads to HOST", "eth0"),
    Flag("start_timeout", "SEC", positive_int, "seconds to wait for all processes (300)", "60", default=300),
    Flag("backend", "NAME", choice("nccl", "gloo"), "left out: nccl where each process has a GPU, else gloo", "gloo"),
    Flag(
        "accelerator",
        "NAME",
        choice("auto", "cpu", "gpu", "cuda", "mps"),
        "auto, cpu, gpu",
        "cpu",
        lightning_key="trainer.accelerator",
    ),
    Flag(
        "precision",
        "P",
        choice("32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true"),
        "32, bf16-mixed, 16-mixed, ...",
        "bf16-mixed",
        lightning_key="trainer.precision",
    ),
    Flag("batch_size", "N", positive_int, "samples a step on each device", "32"),
    Flag("global_batch_size", "N", positive_int, "samples a step over all devices; a resumed run keeps it", "128"),
    Flag(
        "max_device_batch_size",
        "N",
        positive_int,
        "the most samples that a device can hold; a step takes several rounds",
        "32",
    ),
    Flag("root", "DIR", file_path, "where runs are kept (runs)", "runs", default="runs"),
)

NAMES = ("run", "run_name")
"""Aliases of `--name`. torchrun's parser rejects `--run` as an abbreviation of its own `--run-path`, even after the
script's name (python/cpython#58573; seen with Python 3.10.13 to 3.13.0)."""

CKPT_PATH = ("ckpt_path",)
"""LightningCLI's name for `--resume` and `--checkpoint`."""

TRUST = Flag(
    "trust_checkpoint",
    "yes",
    yes_or_no,
    "read a checkpoint that can run any code; only if you trust its author (no)",
    "yes",
    default="no",
)

TRAINING = (
    Flag(
        "name", "NAME", run_name, "the run's name; left out: the next free one, or the job's", "my-run", aliases=NAMES
    ),
    Flag(
        "epochs",
        "N",
        positive_int,
        "passes over the data",
        "10",
        lightning_key="trainer.max_epochs",
        aliases=("total_epochs",),
    ),
    Flag(
        "save_every",
        "N",
        save_interval,
        "epochs (5), steps (200steps) or time (15min) between checkpoints",
        "1",
        default="1",
    ),
    Flag("keep", "N", positive_int, "checkpoints to keep, the newest (3)", "3", default=3),
    Flag(
        "keep_best", "METRIC", metric_to_keep, "keep the best one too: min:val/loss, max:val/accuracy", "min:val/loss"
    ),
    Flag(
        "save_errors",
        "HOW",
        choice("warn", "stop"),
        "a checkpoint that cannot be written: warn, or stop the run",
        "warn",
        default="warn",
    ),
    Flag(
        "resume",
        "HOW",
        resume_from,
        "auto (resume this run), never, or a checkpoint's path",
        "auto",
        default="auto",
        aliases=CKPT_PATH,
    ),
    Flag(
        "accept_changed",
        "WHAT",
        choices("data", "global_batch_size"),
        "carry on although this has changed: data, global_batch_size",
        "data",
    ),
    Flag(
        "time_limit", "TIME", time_limit_value, "time until the run stops (90min, 12:00:00); left out: the job's", "2h"
    ),
    Flag(
        "requeue",
        "HOW",
        choice("auto", "never"),
        "auto (a scheduler's job that was stopped is run again), never",
        "auto",
        default="auto",
    ),
    Flag(
        "max_attempts", "N", positive_int, "attempts of a run after which no other is asked for (100)", "5", default=100
    ),
    Flag(
        "fast",
        "yes",
        yes_or_no,
        "a faster layout and, unless --precision says, bf16 where the device has it (no)",
        "yes",
        default="no",
    ),
    Flag("seed", "N", seed_value, "seed of order, weights and augmentation", "0", lightning_key="seed_everything"),
    TRUST,
)

CHECKPOINT = Flag(
    "checkpoint",
    "PATH",
    checkpoint_of,
    "a checkpoint's path, or best or last of --name; left out: last",
    "runs/my-run",
    aliases=CKPT_PATH,
)

EVALUATING = (
    Flag("name", "NAME", run_name, "the run to evaluate; left out: the newest", "my-run", aliases=NAMES),
    CHECKPOINT,
    Flag("split", "NAME", choice("val", "test"), "val or test", "test", default="val"),
    Flag("output", "FILE", file_path, "where the JSON goes; left out: the run's directory", "metrics.json"),
    Flag("export", "FILE", export_file, "write the weights to FILE (.pt, .safetensors); evaluates nothing", "model.pt"),
    TRUST,
)

PREDICTING = (
    Flag("name", "NAME", run_name, "the run to predict with; left out: the newest", "my-run", aliases=NAMES),
    CHECKPOINT,
    Flag(
        "split",
        "NAME",
        choice("predict", "test", "val"),
        "samples of predict_dataloader (predict), or of test or val",
        "test",
        default="predict",
    ),
    Flag("output", "DIR", file_path, "where the predictions go; left out: predictions/ of the run", "predictions"),
    TRUST,
)
