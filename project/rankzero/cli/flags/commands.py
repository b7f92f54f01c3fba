"""The flags of `fit`, `evaluate` and `predict`. Does not import torch."""

from rankzero.cli.flags.flag import Flag
from rankzero.cli.flags.values import (
    bandwidth_value,
    checkpoint_value,
    choice,
    choices,
    export_file,
    file_path,
    metric_to_keep,
    positive_int,
    profiled_ranks,
    profiled_steps,
    resume_value,
    run_name,
    save_interval,
    seconds_value,
    seed_value,
    time_limit_value,
    yes_or_no,
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
        "on_nan",
        "HOW",
        choice("stop", "warn"),
        "stop (exit code 1) or warn if weights become NaN or infinite [stop]",
        "warn",
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
        "end a run that makes no progress for TIME (seconds, or 5min), name the cause [5min]",
        "5min",
        default=300.0,
    ),
    Flag(
        "hang_action",
        "HOW",
        choice("stop", "report"),
        "stop: end a run that makes no progress; report: only name the cause [stop]",
        "report",
        default="stop",
    ),
    Flag(
        "preflight",
        "HOW",
        choice("quick", "full", "off"),
        "first compare the ranks (quick), run all checks (full) or none (off) [quick]",
        "full",
        default="quick",
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
        "compile",
        "HOW",
        choice("off", "step", "model"),
        "compile each step into one graph (step), or only the model (model) [off]",
        "step",
        default="off",
    ),
    Flag(
        "profile",
        "STEPS",
        profiled_steps,
        "profile 10steps after the warm-up, or 10steps@200 after step 200 [none]",
        "10steps",
    ),
    Flag(
        "log_system",
        "yes",
        yes_or_no,
        "send speed, memory and all other series to your own loggers as well [no]",
        "yes",
        default="no",
    ),
    Flag("profile_ranks", "RANKS", profiled_ranks, "profile these ranks: 0,1 or all [0]", "all"),
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

PREFLIGHT_FLAGS = (
    Flag("json", "FILE", file_path, "write all checks and thresholds as JSON to FILE [none]", "preflight.json"),
    Flag(
        "pairs",
        "WHICH",
        choice("quick", "all", "off"),
        "measure each host with the next (quick), all pairs (all), or none (off) [quick]",
        "all",
        default="quick",
    ),
    Flag("warn_gbps", "X", bandwidth_value, "warn below X Gbit/s between ranks [1]", "10", default=1.0),
    Flag("fail_gbps", "X", bandwidth_value, "fail below X Gbit/s between ranks [0.5]", "1", default=0.5),
)
