"""The table of flags, and the readers of their values. Does not import torch.

A flag with a `lightning_key` is another name for a LightningCLI key (`--epochs` is `--trainer.max_epochs`), both in
YAML and on the command line. `rankzero.cli.lightning_cli` adds all other flags to LightningCLI.

A reader returns the value, or raises a ValueError that describes valid values.
"""

import contextlib
import math
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from rankzero.distributed.environments.launchers import LAUNCHERS
from rankzero.distributed.scheduler.durations import SAVE_INTERVAL, parse_duration
from rankzero.messages import Exit, RequestError, nearest

EXPORTS = (".pt", ".safetensors")
"""Valid suffixes of the file for `--export`."""

Reader = Callable[[str], Any]

NOT_BLANK = r"(?s)(?=.*\S)[^\0]+"
"""Pattern of text that has a visible character and no NUL."""


def whole_number(minimum: int, maximum: float = math.inf) -> Reader:
    """Returns a reader of whole numbers from `minimum` to `maximum`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            valid_range = f">= {minimum}" if maximum == math.inf else f"from {minimum} to {maximum}"
            raise ValueError(f"a whole number {valid_range}")
        return int(text)

    return read


def text_matching(pattern: str, description: str, convert: Reader = str) -> Reader:
    """Returns a reader of text that matches a regular expression as a whole, and is then converted."""

    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise ValueError(description)
        return convert(text)

    return read


positive_int, non_negative_int = whole_number(1), whole_number(0)
seed_value, port_number = whole_number(0, 2**32 - 1), whole_number(1, 2**16 - 1)
bandwidth_value = text_matching(r"[0-9]+(\.[0-9]+)?", "a number of Gbit/s (0.5, 10)", float)
file_path = text_matching(NOT_BLANK, "a path")
hostname = text_matching(r"[!-~]+", "a name without spaces")
save_interval = text_matching(SAVE_INTERVAL, "a number of epochs (5), of steps (200steps) or a time (15min, 2h)")
profiled_steps = text_matching(
    r"0*([1-9][0-9]{0,2}|1000)steps?(@[0-9]{1,18})?",  # a recording of many steps would fill the memory
    "a number of steps from 1 to 1000 (10steps), or the steps after a given one (10steps@200)",
)
profiled_ranks = text_matching(r"all|[0-9]{1,9}(,[0-9]{1,9})*", "all, or ranks separated by commas (0,1)")
metric_to_keep = text_matching(r"(min|max):\S+", "min:NAME or max:NAME, where NAME is a metric that the model logs")
accepted_changes = text_matching(
    r"(data|global_batch_size)(,(data|global_batch_size))*",
    "one or more of data, global_batch_size, separated by commas",
)
run_name = text_matching(
    r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}",
    "a folder name of letters, digits and . _ - + = @ (at most 128 characters, not starting with . or -)",
)


def time_limit_value(text: str) -> str:
    """Reads a time limit in a format of Slurm's `--time`, or with a unit.

    Returns:
        The time in seconds with its unit, such as `5400s`, because YAML 1.1 reads `1:30:00` as a number.
    """
    return f"{parse_duration(text)}s"


def seconds_value(text: str) -> float:
    """Reads a time: seconds, or a number with a unit (`5min`)."""
    with contextlib.suppress(ValueError):
        seconds = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else float(parse_duration(text))
        if seconds > 0:
            return seconds
    raise ValueError("a time in seconds (300) or with a unit (5min)")


def resume_value(text: str) -> str:
    """Reads `auto`, `never` or a path; converts `yes`, `no`, and LightningCLI's `last` and `null`."""
    aliases = {"yes": "auto", "last": "auto", "no": "never", "null": "never", "None": "never"}
    return aliases.get(text) or str(file_path(text))


def checkpoint_value(text: str) -> str:
    """Reads `last`, `best` or a path; converts LightningCLI's `null` to `last`."""
    return "last" if text in ("null", "None") else str(file_path(text))


def choice(*options: str) -> Reader:
    """Returns a reader of one of the `options`."""
    return text_matching("|".join(map(re.escape, options)), "one of " + ", ".join(options))


def yes_or_no(text: str) -> str:
    """Reads `yes` or `no`, or the `True` or `False` to which YAML converts them."""
    return str(choice("yes", "no")({"true": "yes", "false": "no"}.get(text.lower(), text.lower())))


def export_file(text: str) -> str:
    """Reads the path of a file for weights; its suffix must be one of `EXPORTS`."""
    if not file_path(text).endswith(EXPORTS):
        raise ValueError("a file that ends in " + " or ".join(EXPORTS))
    return text


class Flag(NamedTuple):
    """One short flag.

    Args:
        name: Name without dashes.
        metavar: Placeholder for the value in the help.
        read: Reads the value from text, or raises a ValueError that describes valid values.
        help: Description in one line.
        example: A valid value, for error messages.
        commands: The commands that have this flag, for a flag of the table.
        lightning_key: LightningCLI key that has the same meaning, if any.
        aliases: Further names.
        default: Value without the flag; a tuple for a flag that can be repeated.
        bare_value: Value of the flag if it is typed without a value; None if it needs one.
    """

    name: str
    metavar: str
    read: Reader
    help: str
    example: str
    commands: tuple[str, ...] = ()
    lightning_key: str | None = None
    aliases: tuple[str, ...] = ()
    default: Any = None
    bare_value: str | None = None

    def value(self, text: str) -> Any:
        """Reads the value.

        Raises:
            RequestError: The value is invalid.
        """
        try:
            return self.read(text)
        except RequestError:
            raise
        except ValueError as error:
            suggestion = nearest(text, str(error).partition("one of ")[2].split(", "))
            asked, instead = f"--{self.name} {shlex.quote(text)}", f"--{self.name} {suggestion or self.example}"
            raise RequestError(asked, f"{text!r} is not {error}", instead) from None

    def add(self, values: dict[str, Any], text: str) -> None:
        """Stores a value under the flag's name; if the default is a tuple, appends it to the earlier values.

        A tuple is appended value by value.

        Raises:
            RequestError: The value is invalid.
        """
        value = self.value(text)
        if isinstance(self.default, tuple):
            value = (*values.get(self.name, ()), *(value if isinstance(value, tuple) else (value,)))
        values[self.name] = value


NAME_ALIASES = ("run", "run_name")
"""Aliases of `--name`. torchrun's parser rejects `--run` as an abbreviation of its own `--run-path`, even after the
script's name (python/cpython#58573; seen with Python 3.10.13 to 3.13.0)."""

CHECKPOINT_ALIASES = ("ckpt_path",)
"""LightningCLI's name for `--resume` and `--checkpoint`."""

ALL = ("fit", "evaluate", "predict", "preflight")
FIT = ("fit", "preflight")
LOAD = ("evaluate", "predict")
EVALUATE, PREDICT, PREFLIGHT = ("evaluate",), ("predict",), ("preflight",)
"""Commands that have a flag; `preflight` accepts the flags of `fit`."""

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "": (
        Flag("epochs", "N", positive_int, "pass N times over the data [20]", "10", FIT,
             lightning_key="trainer.max_epochs", aliases=("total_epochs",)),
        Flag("name", "NAME", run_name, "name the run [MODEL-DATA-JOBID in a job, else MODEL-DATA-N]", "my-run", FIT,
             aliases=NAME_ALIASES),
        Flag("name", "NAME", run_name, "evaluate this run [the newest]", "my-run", EVALUATE, aliases=NAME_ALIASES),
        Flag("name", "NAME", run_name, "predict with this run [the newest]", "my-run", PREDICT, aliases=NAME_ALIASES),
        Flag("devices", "N", positive_int, "run N processes per machine [from the launcher, or one per GPU, or 1]",
             "2", ALL, lightning_key="trainer.devices"),
    ),
    "What to train": (
        Flag("batch_size", "N", positive_int, "use N samples per step on each device [the data module's number]",
             "32", ALL),
        Flag("global_batch_size", "N", positive_int,
             "use N samples per step over all devices [--batch_size x devices; kept on resume]", "128", ALL),
        Flag("max_device_batch_size", "N", positive_int,
             "accumulate gradients over micro-batches of at most N samples per device [no limit]", "32", ALL),
        Flag("precision", "P", choice("32", "64", "16-mixed", "bf16-mixed", "16-true", "bf16-true"),
             "compute in 32, 64, 16-mixed, bf16-mixed, 16-true or bf16-true [32]", "bf16-mixed", ALL,
             lightning_key="trainer.precision"),
        Flag("fast", "yes", yes_or_no,
             "use a faster memory layout and, without --precision, bf16 if the device has it [no]", "yes", FIT,
             default="no"),
        Flag("compile", "HOW", choice("off", "step", "model"),
             "compile each step into one graph (step), or only the model (model) [off]", "step", FIT, default="off"),
        Flag("seed", "N", seed_value, "seed sample order, weights and augmentation [0]", "0", FIT,
             lightning_key="seed_everything"),
        Flag("split", "NAME", choice("val", "test"), "evaluate the val or the test split [val]", "test", EVALUATE,
             default="val"),
        Flag("split", "NAME", choice("predict", "test", "val"),
             "use the samples of predict_dataloader (predict), test or val [predict]", "test", PREDICT,
             default="predict"),
    ),
    "How long": (
        Flag("time_limit", "TIME", time_limit_value,
             "save and stop within this time (90min, 12:00:00) [the job's limit]", "2h", FIT),
        Flag("requeue", "HOW", choice("auto", "never"), "auto: requeue a stopped job; never: do not [auto]", "auto",
             FIT, default="auto"),
        Flag("max_attempts", "N", positive_int, "do not requeue after N attempts of a run [100]", "5", FIT,
             default=100),
        Flag("stopped_exit_code", "N", whole_number(0, 255), "exit with code N after a stop [75]", "99", FIT,
             default=int(Exit.STOPPED)),
        Flag("hang_timeout", "TIME", seconds_value,
             "end a run that makes no progress for TIME (seconds, or 5min), name the cause [5min]", "5min", FIT,
             default=300.0),
        Flag("hang_action", "HOW", choice("stop", "report"),
             "stop: end a run that makes no progress; report: only name the cause [stop]", "report", FIT,
             default="stop"),
        Flag("on_nan", "HOW", choice("stop", "warn"),
             "stop (exit code 1) or warn if weights become NaN or infinite [stop]", "warn", FIT),
    ),
    "Files": (
        Flag("root", "DIR", file_path, "keep runs in DIR [runs]", "runs", ALL, default="runs"),
        Flag("mirror", "URL", file_path,
             "copy the run to URL (s3://...), and resume from there on an empty disk [none]", "s3://bucket/runs", FIT),
        Flag("output", "FILE", file_path, "write the metrics as JSON to FILE [in the run directory]", "metrics.json",
             EVALUATE),
        Flag("output", "DIR", file_path, "write the predictions to DIR [predictions[-SPLIT]/ in the run directory]",
             "predictions", PREDICT),
        Flag("export", "FILE", export_file,
             "write the weights to FILE (.pt, .safetensors) and evaluate nothing [none]", "model.pt", EVALUATE),
        Flag("save_every", "N", save_interval,
             "save a checkpoint every N epochs (5), steps (200steps) or minutes (15min) [1]", "1", FIT, default="1"),
        Flag("keep", "N", positive_int, "keep the N newest checkpoints [3]", "3", FIT, default=3),
        Flag("keep_best", "METRIC", metric_to_keep,
             "also keep the best checkpoint by METRIC: min:val/loss, max:val/accuracy, ... [none]", "min:val/loss",
             FIT),
        Flag("save_errors", "HOW", choice("warn", "stop"),
             "warn, or stop the run, if a checkpoint cannot be written [warn]", "warn", FIT, default="warn"),
        Flag("resume", "HOW", resume_value, "auto: resume this run; never: do not; PATH: resume from PATH [auto]",
             "auto", FIT, default="auto", aliases=CHECKPOINT_ALIASES),
        Flag("checkpoint", "PATH", checkpoint_value, "load this checkpoint: last or best of --name, or a path [last]",
             "runs/my-run", LOAD, aliases=CHECKPOINT_ALIASES),
        Flag("accept_changed", "WHAT", accepted_changes,
             "resume although this has changed: data, global_batch_size [none]", "data", FIT),
        Flag("trust_checkpoint", "yes", yes_or_no,
             "load a checkpoint that can run any code; only if you trust its author [no]", "yes", ALL, default="no"),
    ),
    "Launching": (
        Flag("nodes", "N", positive_int, "use N machines [from the launcher, or 1]", "2", ALL,
             lightning_key="trainer.num_nodes"),
        Flag("accelerator", "NAME", choice("auto", "cpu", "gpu", "cuda", "mps"),
             "compute on cpu, gpu, cuda or mps [auto: a GPU if there is one]", "cpu", ALL,
             lightning_key="trainer.accelerator"),
        Flag("launcher", "NAME", choice("auto", *LAUNCHERS),
             f"override the detected launcher: {', '.join(LAUNCHERS)} [auto]", "auto", ALL, default="auto"),
        Flag("start_timeout", "TIME", seconds_value,
             "wait at most TIME for all processes, and for slow ones at the start [300 s; none]", "5min", ALL),
        Flag("backend", "NAME", choice("nccl", "gloo"),
             "communicate by nccl or gloo [nccl if each process has its own GPU, else gloo]", "gloo", ALL),
        Flag("interface", "NAME", hostname,
             "communicate over this interface [gloo: the one to --master_addr; nccl: its own choice]", "eth0", ALL),
        Flag("auth", "HOW", choice("auto", "required"),
             "auto: report it if the ranks do not share a key; required: refuse to start then [auto]", "required",
             ALL, default="auto"),
        Flag("node_rank", "R", non_negative_int, "set this machine's number, from 0, without a launcher [none]", "0",
             ALL),
        Flag("master_addr", "HOST", hostname, "rendezvous at HOST, the machine of rank 0 [from the launcher]",
             "node1", ALL),
        Flag("master_port", "PORT", port_number, "rendezvous on this port of HOST [from the launcher]", "29500", ALL),
    ),
    "Checks and profiles": (
        Flag("preflight", "HOW", choice("quick", "full", "off"),
             "first compare the ranks (quick), run all checks (full) or none (off) [quick]", "full", ("fit",),
             default="quick"),
        Flag("profile", "STEPS", profiled_steps,
             "profile 10steps after the warm-up, or 10steps@200 after step 200 [none]", "10steps", FIT),
        Flag("profile_ranks", "RANKS", profiled_ranks, "profile these ranks: 0,1 or all [0]", "all", FIT),
        Flag("log_system", "yes", yes_or_no,
             "send speed, memory and all other series to your own loggers as well [no]", "yes", FIT, default="no"),
        Flag("quiet", "[yes]", yes_or_no,
             "print only the result, warnings and errors: no progress, no line at the start [no]", "yes", ALL,
             default="no", bare_value="yes"),
        Flag("json", "FILE", file_path, "write all checks and thresholds as JSON to FILE [none]", "preflight.json",
             PREFLIGHT),
        Flag("pairs", "WHICH", choice("quick", "all", "off"),
             "measure each host with the next (quick), all pairs (all), or none (off) [quick]", "all", PREFLIGHT,
             default="quick"),
        Flag("warn_gbps", "X", bandwidth_value, "warn below X Gbit/s between ranks [1]", "10", PREFLIGHT, default=1.0),
        Flag("fail_gbps", "X", bandwidth_value, "fail below X Gbit/s between ranks [0.5]", "1", PREFLIGHT, default=0.5),
    ),
    "Advanced": (),
}
"""Title of a group in the help -> its flags; the first group has no title. Flags of one name differ by command."""
# fmt: on


def flags_of(command: str) -> tuple[Flag, ...]:
    """Returns the flags of a command, in the order of its help."""
    return tuple(flag for flags in FLAGS.values() for flag in flags if command in flag.commands)
