"""Loggers over the attempts of a run: the user's continue, and TensorBoard gets charts, hyperparameters and texts."""

import contextlib
import csv
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from rankzero.checkpoints.atomic_files import replacing, write_text
from rankzero.messages import print_notice
from rankzero.runs.directory import RunDirectory
from rankzero.runs.secrets import HIDDEN, launch_line, without_secrets
from rankzero.runs.stored_config import Config, dump_config, flattened
from rankzero.sampling.plan import SamplingPlan
from rankzero.show.report.curves import SERIES, STEP_PARTS
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger
from rankzero.text import GROUPS
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import continue_version, destination, mlflow_run


class UserLoggers:
    """The loggers of a Trainer except the run's own; `run.json` records the version of each."""

    def __init__(self, run: RunDirectory, own: Logger | None) -> None:
        self.run, self.own = run, own
        self._begun: list[Logger] = []  # those that have logged a part of the run in this process

    def continue_versions(self, trainer: Trainer, resumes: bool) -> None:
        """Gives each logger without a version that of the run's earlier attempts, before it creates any file."""
        recorded = self.run.read("run.json").get("loggers") or {}
        for name, logger in self._named(trainer):
            if isinstance(logger, MLFlowLogger):
                may_continue = trainer.is_global_zero and name in recorded and _has_run(logger, recorded[name])
            else:  # Lightning would delete the rows at a URL
                may_continue = name in recorded and not (isinstance(logger, CSVLogger) and "://" in logger.root_dir)
            if may_continue:
                continue_version(logger, recorded[name])
            if isinstance(logger, CSVLogger) and trainer.is_global_zero and (resumes or self.run.attempt > 1):
                _keep_rows(logger)

    def begin(self, trainer: Trainer, step: int) -> None:
        """Removes what a lost attempt has logged at `step` or later, and records the versions. Only on rank zero.

        Values at the last step of a finished run stay, because `trainer.test()` has logged them after the fit.
        """
        earlier = self.run.read("summary.json")
        is_end = earlier.get("attempts") == self.run.attempt - 1 and earlier.get("status") == "finished"
        for _, logger in self._named(trainer):
            if (self.run.attempt > 1 or trainer.ckpt_path) and logger not in self._begun:
                _remove_lost_rows(logger, step + (is_end and earlier.get("steps") == step))
            self._begun.append(logger)
        record, named = self.run.read("run.json"), self._named(trainer)
        versions = {name: logger.version for name, logger in named if isinstance(logger.version, int | str)}
        if record and record.get("loggers", {}) != versions:
            self.run.record = record | {"loggers": versions}
            with contextlib.suppress(OSError):  # the next write reports it
                write_text(self.run.path / "run.json", json.dumps(self.run.record, indent=2) + "\n")

    def _named(self, trainer: Trainer) -> Iterator[tuple[str, Logger]]:
        """Yields the loggers that can be continued, by a name that does not depend on other loggers."""
        names: list[str] = []
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger | MLFlowLogger | WandbLogger):
                names.append(f"{type(logger).__name__} {destination(logger)}")
                if logger is not self.own:
                    yield f"{names[-1]} {names.count(names[-1])}", logger


def _has_run(logger: MLFlowLogger, version: str) -> bool:
    """Returns whether MLflow still has a run, whose hyperparameters then stay as they are: MLflow permits no change."""
    try:
        if (run := mlflow_run(logger, version)) is None:
            return False
        if run.info.lifecycle_stage != "active":
            raise ValueError(f"it is {run.info.lifecycle_stage}")
    except Exception as error:
        print_notice(f"{type(logger).__name__} begins a new run, because run {version} cannot be continued: {error}")
        return False
    log = logger.log_hyperparams

    def log_hyperparams(*arguments: Any) -> None:
        try:
            log(*arguments)
        except Exception as error:
            print_notice(f"run {version} of MLflow keeps its hyperparameters: {str(error).partition(chr(10))[0]}")

    vars(logger)["log_hyperparams"] = log_hyperparams
    return True


def _keep_rows(logger: CSVLogger) -> None:
    """Creates the file of a logger before Lightning does, which deletes an existing file (lightning 2.6)."""
    path = Path(logger.log_dir, "metrics.csv")
    kept = path.with_name(f"{path.name}.kept")
    if kept.exists() and not path.exists():  # a process was killed below
        kept.rename(path)
    if not path.is_file():
        return
    path.rename(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns that it deletes the file
        experiment = logger.experiment
    kept.rename(path)
    experiment.metrics_keys = experiment.metrics_keys or next(csv.reader(path.read_text().splitlines()), [])


def _remove_lost_rows(logger: Logger, step: int) -> None:
    """Removes the rows at `step` or later from the file of a CSV logger, and hides them in those of TensorBoard."""
    if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
        header, *rows = [*csv.reader(path.read_text().splitlines())] or [["step"]]
        column = header.index("step")
        whole = [row for row in rows if len(row) == len(header)]  # a full disk may have cut the last one
        with replacing(path, ".kept") as temporary, temporary.open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row for row in whole if float(row[column]) < step)])
    elif isinstance(logger, TensorBoardLogger):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = Event(session_log=SessionLog(status=SessionLog.START))
        logger.experiment.file_writer.add_event(start, step)  # like `purge_step` of torch's writer


_OF_MODEL = f"(?!train/samples|{'|'.join(GROUPS)})"
"""Pattern before the tags that the user's module logs."""

LAYOUT = {
    "1. Learning": {
        "loss": ["Multiline", [rf"{_OF_MODEL}.*loss"]],
        "metrics": ["Multiline", [rf"{_OF_MODEL}(?!.*loss)(?!train/lr).+"]],
        "learning rate": ["Multiline", ["train/lr"]],
        "gradient norm": ["Multiline", ["weights/gradient_norm"]],
    },
    "2. Speed": {
        "samples per second": ["Multiline", ["train/samples_per_second"]],
        "parts of a step (ms)": ["Multiline", list(STEP_PARTS)],
        "TFLOP/s per device": ["Multiline", ["workload/teraflops_per_second"]],
    },
    "3. Ranks": {
        "time to the first gradient (ms)": ["Multiline", ["world/first_gradient_ms/"]],
        "waiting for data (ms per step)": ["Multiline", ["world/data_wait_ms/"]],
    },
    "4. Memory and checkpoints": {
        "memory (GiB)": ["Multiline", [r"workload/(host|device)_memory_gib"]],
        "checkpoint (s)": ["Multiline", [r"wall_time/checkpoint.*_s"]],
    },
}
"""Group -> chart -> kind of chart and patterns of the tags that it contains, for TensorBoard's custom scalars."""

HYPER_PARAMETERS = ("model", "data", "seed_everything", "global_batch_size", "fast")
OF_TRAINER = ("precision", "max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val")


class TensorBoardPage(LoopCallback):
    """Logs everything that TensorBoard shows of a run besides scalars and images, at the start of each attempt."""

    def __init__(
        self,
        run: RunDirectory,
        config: Callable[[], Config],
        plan: SamplingPlan,
        logger: DurableTensorBoardLogger,
        user_loggers: UserLoggers,
    ) -> None:
        self.run, self.config, self.plan, self.logger, self.user_loggers = run, config, plan, logger, user_loggers

    def on_ready(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        logger = self.logger
        if self.run.attempt > 1:
            logger.purge_from(_steps_on_curves(trainer))
        self.user_loggers.begin(trainer, _steps_on_curves(trainer))
        config = self.config()
        environment = self.run.read(f"attempts/{self.run.attempt:04d}/environment.json")
        texts = {
            "run/attempts": attempt_text(self.run.attempt, trainer.global_step, environment),
            "run/configuration": f"```yaml\n{dump_config(without_secrets(config))}```",
            "run/environment": table_text(environment),
        }
        hyper_parameters = hyper_parameters_of(config) | {"processes": trainer.world_size}
        if self.plan.order:
            hyper_parameters["global_batch_size"] = self.plan.order.global_batch_size
        logger.descriptions = {tag: series.description for tag, series in SERIES.items()} | logger.descriptions
        logger.log_with(lambda writer: writer.add_custom_scalars(LAYOUT))
        logger.log_with(lambda writer: _add_session(writer, hyper_parameters))
        for tag, text in texts.items():
            logger.log_text(tag, text, trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.logger.flush()  # values logged before the checkpoint must be on disk before it

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.logger.log_with(lambda writer: _add_session(writer, {}, is_end=True))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.logger.finalize("failed")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.logger.finalize("success")


def attempt_text(attempt: int, step: int, environment: Mapping[str, Any]) -> str:
    """Returns a description of an attempt as Markdown."""
    hosts = ", ".join(environment.get("hosts") or {}) or "an unknown host"
    commit = f", commit {environment['commit']}" if environment.get("commit") else ""
    lines = [f"Attempt {attempt} began after step {step} on {hosts}{commit}."]
    command = launch_line(environment)
    return "\n\n".join([*lines, f"```sh\n{command}\n```"] if command else lines)


def table_text(values: Mapping[str, Any]) -> str:
    """Returns values as a table in Markdown, with one row per value."""
    known = {name: value for name, value in values.items() if value is not None and name != "command"}
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in known.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def hyper_parameters_of(config: Config) -> dict[str, bool | int | float | str]:
    """Returns the settings that may change the result of training, by their names in the configuration."""
    chosen = {name: config[name] for name in HYPER_PARAMETERS if name in config}
    trainer_settings = config.get("trainer") or {}
    chosen |= {name: trainer_settings[name] for name in OF_TRAINER if name in trainer_settings}
    known = {name: value for name, value in flattened(without_secrets(chosen)).items() if value not in (None, HIDDEN)}
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in known.items()}


def _steps_on_curves(trainer: Trainer) -> int:
    """Returns the number of steps of the resumed run; values are logged over batches (lightning 2.6)."""
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return int(trainer.fit_loop.epoch_loop.steps_done)  # type: ignore[attr-defined]


def _add_session(writer: Any, hyper_parameters: dict[str, Any], is_end: bool = False) -> None:
    """Adds the hyperparameters of the run, or its end, without the summary that defines an experiment.

    TensorBoard (2.21) shows the hyperparameters of the first such summary that it finds, also for runs of other models.
    Without it, TensorBoard shows those of all runs. `SummaryWriter.add_hparams` would write to another directory.
    """
    from torch.utils.tensorboard.summary import hparams

    _, session_start, session_end = hparams(hyper_parameters, {})
    writer.file_writer.add_summary(session_end if is_end else session_start)
