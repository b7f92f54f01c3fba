"""The arguments of `rankzero.Trainer`: Lightning's, which a script may set, and those that Rankzero adds."""

import inspect
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, LayerSync, environments
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from rankzero.cli.flags import flags_of
from rankzero.cli.foreign_flags import equivalent_flag
from rankzero.distributed.coordination.session import report_uncaught_errors
from rankzero.distributed.process.lightning_names import check_base
from rankzero.messages import RequestError, WrongArgumentError, mark_refusal, nearest
from rankzero.training.lightning_inside import defaults_from_variables

TRAINER_FLAGS = {flag.name: flag for flag in flags_of("fit") if flag.lightning_key is None or flag.name == "seed"}
"""Flags that Rankzero adds to the arguments of the Trainer; all other flags stand for Lightning's arguments."""

_KEYS = {name: flag.lightning_key or name for flag in flags_of("fit") for name in (flag.name, *flag.aliases)}

_SHELL_COMMAND = re.compile(r" *(type +)?(or )?(srun|mpirun|torchrun|pbsdsh|python|[A-Z_]+=\S+) ")


def argument_of(flag: str) -> str:
    """Returns the argument of the Trainer for a flag: `max_epochs` for `epochs`."""
    return "seed" if flag == "seed" else _KEYS.get(flag, flag).rpartition(".")[2]


def as_arguments(text: str) -> str:
    """Spells flags as arguments of the Trainer: `--save_every 200steps` as `save_every="200steps"`.

    `--model NAME` becomes `the model NAME`, since the model is no argument. In shell command lines, only the name of
    the script changes.
    """

    def as_argument(match: re.Match[str]) -> str:
        flag, value = match[1], match[2] and match[2].strip("'")
        name = argument_of(flag)
        if value and name in ("model", "data"):
            return f"the {name} {value}"
        if value is None or value in ("or", "and", "with", "for", "in", "to", "is", "on", "out"):
            return name + (f" {value}" if value else "")
        is_unquoted = value.isupper() or value in ("None", "True", "False") or re.fullmatch(r"-?[0-9.]+", value)
        return f"{name}={value}" if is_unquoted else f'{name}="{value}"'

    text = text.replace("launch/fit.py", Path(sys.argv[0]).name or "train.py")
    lines = text.replace("the same command", "the same script").split("\n")
    flag_pattern = r"--([a-z_.]*[a-z_])(?: ('[^']*'|[^\s,;()]*[^\s,;().]))?"
    return "\n".join(line if _SHELL_COMMAND.match(line) else re.sub(flag_pattern, as_argument, line) for line in lines)


def read_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Reads Rankzero's arguments of the Trainer in the same way as the flags of the same names.

    Raises:
        RequestError: A value is not valid for its flag.
    """
    return {
        name: TRAINER_FLAGS[name].default if value is None else TRAINER_FLAGS[name].value(_as_text(value))
        for name, value in arguments.items()
    }


def as_list(value: Any) -> list[Any]:
    """Returns the items of an argument that may be None, one item or several, as in OmegaConf's ListConfig."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _as_text(value: Any) -> str:
    """Returns an argument as the user would type it after its flag."""
    if isinstance(value, timedelta):
        return f"{math.ceil(value.total_seconds())}s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    is_text = isinstance(value, str) or not isinstance(value, Sequence | set)
    return str(value) if is_text else ",".join(map(str, value))


def refuses_wrong_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method of the Trainer refuse unknown names, models that are no LightningModule, and misplaced data."""
    names = list(inspect.signature(method).parameters)[1:]
    call = f"trainer.{method.__name__}"

    @wraps(method)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        _check_names(call, named, names)
        _check_values(call, dict(zip(names, arguments, strict=False)) | named, names)
        return method(self, *arguments, **named)

    return checked


def refuses_wrong_settings(initialize: Callable[..., None]) -> Callable[..., None]:
    """Lets the Trainer's constructor refuse unknown names and settings that Lightning refuses.

    Arguments without names have the order of `lightning.pytorch.Trainer`.
    """
    names = list(inspect.signature(initialize).parameters)[1:]
    positional = list(inspect.signature(pl.Trainer.__init__).parameters)[1:]

    @wraps(initialize)
    def checked(self: Any, *arguments: Any, **named: Any) -> None:
        report_uncaught_errors()
        _check_names("Trainer", named, names)
        try:
            initialize(self, **named | dict(zip(positional, arguments, strict=False)))
        except Exception as error:
            mark_refusal(error)
            raise

    return checked


def _check_names(call: str, named: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := [name for name in named if name not in names]:
        similar = [name for name in (_similar(name, names) for name in unknown) if name]
        asked, instead = (", ".join(f"{name}=..." for name in some) for some in (unknown, similar))
        found = f"it has no argument {' or '.join(unknown)}"
        raise WrongArgumentError(f"{call}({asked})", found, instead or f"one of {', '.join(names)}")


def _similar(name: str, names: Sequence[str]) -> str | None:
    """Returns the argument for a flag, or for a name of another trainer's, or the most similar one."""
    flag = re.match("--([a-z_.]+)", equivalent_flag(name, None, [flag.name for flag in flags_of("fit")], "") or "")
    candidates = (argument_of(name), argument_of(flag[1]) if flag else "")
    return next((candidate for candidate in candidates if candidate in names), None) or nearest(name, names)


def _check_values(call: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    if (model := values.get("model")) is not None:
        check_base(call, type(model))
        if not isinstance(getattr(model, "_orig_mod", model), pl.LightningModule):  # `torch.compile` wraps a model
            found = f"`model` must be a `LightningModule` or a compiled one, got `{type(model).__qualname__}`"
            raise WrongArgumentError(f"{call}(model)", found, f"{call}(MyModule(), ...)")
    loaders = next(name for name in names if name.endswith("dataloaders"))
    for name, value in values.items():
        if isinstance(value, type):
            raise WrongArgumentError(f"{call}({name}=...)", f"the class {value.__name__}", f"{value.__name__}()")
        if name == "datamodule" and isinstance(value, DataLoader):
            raise WrongArgumentError(f"{call}(datamodule=...)", "a DataLoader", f"{loaders}=...")
        if name == "val_dataloaders" and isinstance(value, pl.LightningDataModule):
            raise WrongArgumentError(f"{call}({name}=...)", "a LightningDataModule", "datamodule=...")


Plugin = PrecisionPlugin | ClusterEnvironment | CheckpointIO | LayerSync
_Engine = Literal["transformer-engine", "transformer-engine-float16"]
_Format = Literal["16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true"]
Precision = Literal[64, 32, 16] | Literal[_Engine, _Format] | Literal["64", "32", "16", "bf16"]

_DETECTED = (LightningEnvironment, SLURMEnvironment, environments.MPIEnvironment, environments.TorchElasticEnvironment)
"""Cluster environments whose launcher Rankzero detects."""


class TrainerArguments(pl.Trainer):
    """Base class of `rankzero.Trainer`, which states its arguments for editors, `help` and LightningCLI."""

    @refuses_wrong_settings
    @defaults_from_variables
    def __init__(
        self,
        *,
        name: str | None = None,
        root: str | Path = "runs",
        mirror: str | None = None,
        resume: str | Path = "auto",
        save_every: str | int = 1,
        keep: int = 3,
        keep_best: str | None = None,
        save_errors: str = "warn",
        on_nan: str | None = None,
        accept_changed: str | None = None,
        trust_checkpoint: bool | str = False,
        time_limit: str | int | timedelta | None = None,
        requeue: str = "auto",
        max_attempts: int = 100,
        stopped_exit_code: int = 75,
        fast: bool | str = False,
        compile: str = "off",
        seed: int | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        max_device_batch_size: int | None = None,
        launcher: str = "auto",
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        interface: str | None = None,
        auth: str = "auto",
        backend: str | None = None,
        start_timeout: float | None = None,
        hang_timeout: str | int | timedelta = 300,
        hang_action: str = "stop",
        profile: str | None = None,
        profile_ranks: str | int | list[int] | None = None,
        log_system: bool | str = False,
        preflight: str = "quick",
        quiet: bool | str = False,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Precision | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        """Reads the arguments and builds the Trainer.

        Variables such as `PL_TRAINER_MAX_EPOCHS` set defaults, as in Lightning.

        Args:
            name: Name of the run; None adds the job id or the next free number to the script's name.
            root: Directory that contains all runs.
            mirror: URL of a folder, such as `s3://bucket/runs`, to copy the run to; an empty disk resumes from it.
            resume: `auto` resumes the run, `never` archives and restarts it, a path is a checkpoint to resume from.
            save_every: Epochs (5), steps ("200steps") or time ("15min") between checkpoints.
            keep: Number of newest checkpoints to keep.
            keep_best: Metric whose best checkpoint is kept as well: `min:val/loss`, `max:val/accuracy`.
            save_errors: Whether a checkpoint that cannot be written stops the run (`stop`) or not (`warn`).
            on_nan: Whether a run ends if its weights are NaN or infinite (`stop`), or trains on (`warn`, the default).
            accept_changed: Settings that may differ from the resumed checkpoint: `data`, `global_batch_size`.
            trust_checkpoint: Whether a checkpoint may run code; only for authors that you trust.
            time_limit: Time until the run saves and stops: `2h`, `90min` or a timedelta; None for the job's time limit.
            requeue: `auto` requeues a stopped job with the scheduler, `never` does not.
            max_attempts: Number of attempts after which the job is no longer requeued.
            stopped_exit_code: Exit code of the program after a stop at a safe point.
            fast: Whether to choose a faster memory layout and, without `precision`, bf16 if the device supports it.
            compile: `step` compiles forward, backward and update as one graph, `model` only the model, `off` nothing.
            seed: Seed of all generators; None leaves them unchanged and orders samples by PL_GLOBAL_SEED, or at random.
            batch_size: Samples per batch on each device; None for the batch size of each loader.
            global_batch_size: Samples per optimizer step over all devices; a resumed run keeps it.
            max_device_batch_size: Largest batch per device; larger steps accumulate gradients.
            launcher: `auto`, or the launcher whose variables to read.
            node_rank: Index of this machine, from 0, if no launcher connects the machines.
            master_addr: Host of rank 0.
            master_port: Port for the rendezvous on that host.
            interface: Network interface to use.
            auth: `required` starts only if all ranks know the same key; `auto` prints a line if they do not.
            backend: `nccl` or `gloo`; None selects the backend by device.
            start_timeout: Seconds to wait for all processes, and for each to build data and model (300, and no limit).
            hang_timeout: Time without progress after which a run hangs: 300 (seconds), `5min` or a timedelta.
            hang_action: Whether a hang ends the run (`stop`) or is only reported (`report`).
            profile: Steps to profile: "10steps" after the start, "10steps@200" after step 200; None for no profile.
            profile_ranks: Ranks to profile: 0, [0, 1] or "all"; None for rank 0.
            log_system: Whether your own loggers receive Rankzero's series too, in the rows of your values.
            preflight: Checks before training: `quick` compares the ranks, `full` runs all checks, `off` runs none.
            quiet: Whether to print only the result, warnings and errors.
            accelerator: Device type: `cpu`, `gpu`, `cuda`, `mps` or `auto`.
            strategy: `auto`, `ddp`, `ddp_find_unused_parameters_true` or a DDPStrategy.
            devices: Processes per machine, or a list of GPU indices; `auto` for the launcher's, or one per GPU.
            num_nodes: Number of machines.
            precision: `32-true`, `16-mixed`, `bf16-mixed`, `16-true`, `bf16-true` or `64-true`.
            logger: Loggers; None or True for the run's TensorBoard logger, False for none.
            callbacks: One callback or several.
            fast_dev_run: Whether to run one batch of each loader as a test, or the number of batches; writes no files.
            max_epochs: Number of epochs; None for 1000 unless `max_steps` or `max_time` is set, -1 for no limit.
            min_epochs: Least number of epochs, even if a callback stops training.
            max_steps: Number of optimizer steps; -1 for no limit.
            min_steps: Least number of optimizer steps.
            max_time: Time after which training is finished: `DD:HH:MM:SS`, a timedelta or its arguments.
            limit_train_batches: Training batches of an epoch: a number (int) or a fraction (float).
            limit_val_batches: Validation batches, likewise.
            limit_test_batches: Test batches, likewise.
            limit_predict_batches: Prediction batches, likewise.
            overfit_batches: Batches, or fraction of them, to train on in every epoch without shuffling.
            val_check_interval: Interval between validations: a fraction of an epoch, a number of batches or a time.
            check_val_every_n_epoch: Epochs between validations; None counts `val_check_interval` over epochs.
            num_sanity_val_steps: Validation batches before training (2); -1 for all.
            log_every_n_steps: Steps between logged values (50).
            enable_checkpointing: Whether the run writes checkpoints.
            enable_progress_bar: Whether progress is shown.
            enable_model_summary: Whether a table of the model's layers is printed.
            accumulate_grad_batches: Batches per optimizer step.
            gradient_clip_val: Largest norm or value of the gradients; None for no limit.
            gradient_clip_algorithm: `norm` or `value`.
            deterministic: Whether torch uses deterministic algorithms only; `warn` where they exist.
            benchmark: Value of `torch.backends.cudnn.benchmark`; None leaves it unchanged.
            inference_mode: Whether evaluation runs in `torch.inference_mode`, and not in `torch.no_grad`.
            use_distributed_sampler: Whether the draws of a sampler of yours are divided among the ranks.
            profiler: Lightning's profiler: `simple`, `advanced`, `pytorch`, `xla` or an object.
            detect_anomaly: Whether autograd checks for NaN and names the operation.
            barebones: Whether to switch off logging, checkpoints and progress, to measure the Trainer's overhead.
            plugins: Plugins of Lightning.
            sync_batchnorm: Whether batch norm uses the samples of all ranks.
            reload_dataloaders_every_n_epochs: Epochs after which the loaders are created again; 0 for never.
            default_root_dir: Directory that contains all runs, unless `root` is given.
            enable_autolog_hparams: Whether hyperparameters are logged at the start.
            model_registry: Name of the model in a registry.
        """
        values = locals()
        # A script may replace `pl.Trainer` by this class.
        parameters = inspect.signature(super().__init__).parameters.values()
        lightning = {one.name: values[one.name] for one in parameters if values[one.name] != one.default}
        self._build({name: values[name] for name in TRAINER_FLAGS}, lightning)

    def _initialize(self, **arguments: Any) -> None:
        """Calls the constructor of Lightning's Trainer, without its decorator: PL_TRAINER_* has been read."""
        super().__init__.__wrapped__(self, **arguments)  # type: ignore[attr-defined]

    @abstractmethod
    def _build(self, own_arguments: dict[str, Any], lightning: dict[str, Any]) -> None:
        """Builds the Trainer."""


def without_replaced(plugins: Sequence[Any], arguments: dict[str, Any]) -> list[Any]:
    """Returns the plugins without those whose work Rankzero does, and sets the arguments that they stand for.

    `LightningEnvironment` stands for `launcher="local"`, and `SLURMEnvironment(auto_requeue=False)` for
    `requeue="never"`.

    Raises:
        RequestError: A plugin would replace Rankzero's checkpoints or launchers by code of the user's.
    """
    kept = []
    for plugin in plugins:
        if type(plugin) is LightningEnvironment and arguments["launcher"] == "auto":
            arguments["launcher"] = "local"
        if type(plugin) is SLURMEnvironment and not plugin.auto_requeue:
            arguments["requeue"] = "never"
        if type(plugin) in (*_DETECTED, TorchCheckpointIO):
            continue
        if type(plugin) is AsyncCheckpointIO and type(plugin.checkpoint_io or TorchCheckpointIO()) is TorchCheckpointIO:
            continue
        if isinstance(plugin, CheckpointIO | ClusterEnvironment):
            work = "writes checkpoints" if isinstance(plugin, CheckpointIO) else "detects the launcher"
            raise RequestError(f"plugins=[{type(plugin).__name__}(...)]", f"Rankzero {work} itself", "no such plugin")
        kept.append(plugin)
    return kept
