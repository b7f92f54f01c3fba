"""The short flags of the commands. Does not import torch.

A flag with a `lightning_key` is another name for a LightningCLI key (`--epochs` is `--trainer.max_epochs`), both in
YAML and on the command line. `rankzero.cli.lightning_cli` adds all other flags to LightningCLI.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from rankzero.cli.flag_values import (
    checkpoint_value,
    choice,
    choices,
    export_file,
    file_path,
    hostname,
    metric_to_keep,
    non_negative_int,
    port_number,
    positive_int,
    resume_value,
    run_name,
    save_interval,
    seconds_value,
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
            suggestion = (
                nearest(text, str(error).removeprefix("one of ").split(", ")) if "one of" in str(error) else None
            )
            raise RequestError(
                f"--{self.name} {text}", f"{text!r} is not {error}", f"--{self.name} {suggestion or self.example}"
            ) from None


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
        "wait at most SEC seconds until all processes have connected [300]",
        "60",
        default=300,
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
    Flag("root", "DIR", file_path, "keep runs in DIR [runs]", "runs", default="runs"),
)

NAME_ALIASES = ("run", "run_name")
"""Aliases of `--name`. torchrun's parser rejects `--run` as an abbreviation of its own `--run-path`, even after the
script's name (python/cpython#58573; seen with Python 3.10.13 to 3.13.0)."""

CHECKPOINT_ALIASES = ("ckpt_path",)
"""LightningCLI's name for `--resume` and `--checkpoint`."""

TRUST_CHECKPOINT = Flag(
    "trust_checkpoint",
    "yes",
    yes_or_no,
    "load a checkpoint that can run any code; only if you trust its author [no]",
    "yes",
    default="no",
)

TRAINING_FLAGS = (
    Flag(
        "name",
        "NAME",
        run_name,
        "name the run [MODEL-DATA-JOBID in a job, else MODEL-DATA-N]",
        "my-run",
        aliases=NAME_ALIASES,
    ),
    Flag(
        "epochs",
        "N",
        positive_int,
        "pass N times over the data [20]",
        "10",
        lightning_key="trainer.max_epochs",
        aliases=("total_epochs",),
    ),
    Flag(
        "save_every",
        "N",
        save_interval,
        "save a checkpoint every N epochs (5), steps (200steps) or minutes (15min) [1]",
        "1",
        default="1",
    ),
    Flag("keep", "N", positive_int, "keep the N newest checkpoints [3]", "3", default=3),
    Flag(
        "keep_best",
        "METRIC",
        metric_to_keep,
        "also keep the best checkpoint by METRIC: min:val/loss, max:val/accuracy, ... [none]",
        "min:val/loss",
    ),
    Flag(
        "save_errors",
        "HOW",
        choice("warn", "stop"),
        "warn, or stop the run, if a checkpoint cannot be written [warn]",
        "warn",
        default="warn",
    ),
    Flag(
        "resume",
        "HOW",
        resume_value,
        "auto: resume this run; never: do not; PATH: resume from PATH [auto]",
        "auto",
        default="auto",
        aliases=CHECKPOINT_ALIASES,
    ),
    Flag(
        "accept_changed",
        "WHAT",
        choices("data", "global_batch_size"),
        "resume although this has changed: data, global_batch_size [none]",
        "data",
    ),
    Flag(
        "time_limit",
        "TIME",
        time_limit_value,
        "save and stop within this time (90min, 12:00:00) [the job's limit]",
        "2h",
    ),
    Flag(
        "hang_timeout",
        "TIME",
        seconds_value,
        "end the run after TIME without progress (300, 5min), and report which rank is the cause [5min]",
        "5min",
        default=300.0,
    ),
    Flag(
        "hang_action",
        "HOW",
        choice("stop", "report"),
        "stop: end a run that hangs; report: only print which rank is the cause [stop]",
        "report",
        default="stop",
    ),
    Flag(
        "requeue",
        "HOW",
        choice("auto", "never"),
        "auto: requeue a stopped job; never: do not [auto]",
        "auto",
        default="auto",
    ),
    Flag("max_attempts", "N", positive_int, "do not requeue after N attempts of a run [100]", "5", default=100),
    Flag(
        "fast",
        "yes",
        yes_or_no,
        "use a faster memory layout and, without --precision, bf16 if the device has it [no]",
        "yes",
        default="no",
    ),
    Flag(
        "seed", "N", seed_value, "seed sample order, weights and augmentation [0]", "0", lightning_key="seed_everything"
    ),
    TRUST_CHECKPOINT,
)

CHECKPOINT = Flag(
    "checkpoint",
    "PATH",
    checkpoint_value,
    "load this checkpoint: last or best of --name, or a path [last]",
    "runs/my-run",
    aliases=CHECKPOINT_ALIASES,
)

EVALUATION_FLAGS = (
    Flag("name", "NAME", run_name, "evaluate this run [the newest]", "my-run", aliases=NAME_ALIASES),
    CHECKPOINT,
    Flag("split", "NAME", choice("val", "test"), "evaluate the val or the test split [val]", "test", default="val"),
    Flag("output", "FILE", file_path, "write the metrics as JSON to FILE [in the run directory]", "metrics.json"),
    Flag(
        "export",
        "FILE",
        export_file,
        "write the weights to FILE (.pt, .safetensors) and evaluate nothing [none]",
        "model.pt",
    ),
    TRUST_CHECKPOINT,
)

PREDICTION_FLAGS = (
    Flag("name", "NAME", run_name, "predict with this run [the newest]", "my-run", aliases=NAME_ALIASES),
    CHECKPOINT,
    Flag(
        "split",
        "NAME",
        choice("predict", "test", "val"),
        "use the samples of predict_dataloader (predict), test or val [predict]",
        "test",
        default="predict",
    ),
    Flag(
        "output",
        "DIR",
        file_path,
        "write the predictions to DIR [predictions[-SPLIT]/ in the run directory]",
        "predictions",
    ),
    TRUST_CHECKPOINT,
)
