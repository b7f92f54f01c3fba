"""Lightning's Trainer with launcher detection, an exact sample order, durable checkpoints and stops at safe points."""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.callbacks import Callback, Checkpoint

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import Retention
from rankzero.cli.trainer_arguments import (
    TRAINER_FLAGS,
    TrainerArguments,
    as_arguments,
    as_list,
    read_arguments,
    refuses_wrong_arguments,
    without_replaced,
)
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.cluster import LaunchEnvironment
from rankzero.distributed.environments.validate import requested_world
from rankzero.distributed.scheduler.job import attempt_deadline
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.torch_inside import missing, set_compile_cache
from rankzero.messages import RequestError, Stopped, is_quiet, print_notice, set_quiet, set_spelling
from rankzero.runs.attempt import Attempt, Outcome, agree_on_run
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import RunOptions
from rankzero.runs.secrets import prose_without_secrets
from rankzero.runs.stored_config import CONSTANTS, Config, as_json, describe_config, flattened
from rankzero.runs.summary import metrics_of
from rankzero.sampling.generators import draw_seed, global_seed
from rankzero.sampling.plan import SamplingPlan
from rankzero.show.figures.callback import RunFigures
from rankzero.show.loggers import TensorBoardPage, UserLoggers
from rankzero.show.measurements.interval_measurements import IntervalMeasurements
from rankzero.show.measurements.step_time import SlowRanks
from rankzero.show.measurements.throughput import Throughput
from rankzero.show.profile import Profile, ProfileRequest
from rankzero.show.progress import progress_callbacks, without_progress
from rankzero.show.tensorboard_logger import DurableTensorBoardLogger, without_files
from rankzero.show.terminal import ResultDisplay
from rankzero.training import fit_loop
from rankzero.training.callbacks.agreements import RankAgreements
from rankzero.training.callbacks.checkpointing import CheckpointCallback, Interval
from rankzero.training.callbacks.failure import ReportFailure
from rankzero.training.callbacks.finite_weights import FiniteWeights
from rankzero.training.callbacks.safe_point import NoSignalConnector, SafePoint
from rankzero.training.callbacks.sample_ledger import SampleLedger
from rankzero.training.ddp import strategy_for
from rankzero.training.lightning_inside import check_release
from rankzero.training.metrics import epoch_averages
from rankzero.training.prediction_loop import PredictionLoop
from rankzero.training.saved_state.checkpoint_choice import ChosenCheckpoint, as_given
from rankzero.training.saved_state.rank_states import RankStates
from rankzero.training.saved_state.settings import (
    KeepFound,
    LiveSettings,
    OptimizerOverrides,
    check_batch_sizes,
    is_tuning,
)
from rankzero.training.speed import layout
from rankzero.training.speed.compiled_step import CompiledStep, compiled_model


class Trainer(TrainerArguments):
    """Lightning's Trainer for one process or many, started by any launcher or by none.

    Takes every argument of `lightning.pytorch.Trainer`, and arguments that are flags of `rankzero fit` too.
    Detects the launcher that started the script (torchrun, srun, mpirun, pbsdsh, flux, jsrun, or variables such as
    `RANK`). Without a launcher, `devices=N` starts the script in N processes.

    Attributes:
        run: Directory of the run.
        outcome: Whether training has begun, and the error of this rank.
        config: Configuration to store with checkpoints; None stores a description of the arguments.

    Raises:
        RequestError: The request cannot be fulfilled. If uncaught, it is printed without a traceback, with exit code 2.
    """

    def _build(self, own_arguments: dict[str, Any], lightning: dict[str, Any]) -> None:
        """Joins the session, chooses the run's directory, builds plan, callbacks, plugins and loops.

        The constructor (`cli/trainer_arguments.py`) calls it.
        """
        check_release()
        if Session.current is None:
            set_spelling(as_arguments)
        arguments = read_arguments(own_arguments)
        Stopped.exit_code = arguments["stopped_exit_code"]
        plugins = without_replaced(as_list(lightning.get("plugins")), arguments)
        self.session = session = Session.for_trainer(requested_world(arguments, lightning))
        coordinator, world, barebones = session.coordinator, session.world, bool(lightning.get("barebones"))
        channel = coordinator.control_channel
        saves = not barebones and lightning.get("enable_checkpointing") is not False
        self.run = _agree_on_run(session, arguments, lightning)
        self.config: Config | None = None
        self._stored_config: Config | None = None
        explicit = {name: value for name, value in arguments.items() if value != TRAINER_FLAGS[name].default}
        self._explicit_arguments = explicit | lightning
        self.outcome, self._options, self._keep = Outcome(), RunOptions.read(arguments), arguments["keep"]
        self._has_fitted = False
        user_callbacks = as_list(lightning.get("callbacks"))
        set_quiet(arguments["quiet"] == "yes")
        lightning = without_progress(lightning, user_callbacks) if is_quiet() else lightning
        for feature in missing if world.rank == 0 else ():
            print_notice(f"without {feature}: {missing[feature]}")
        if arguments["seed"] is not None:
            seed_everything(arguments["seed"], verbose=False)
        own = [global_seed(), arguments["fast"] == "yes", arguments["compile"], arguments["preflight"]]
        seed, self._is_fast, self._compile, self._preflight = coordinator.broadcast_object(own, "running the script")
        self.plan = plan = SamplingPlan(
            rank=world.rank,
            world_size=world.size,
            seed=seed or 0,
            batch_size=arguments["batch_size"],
            global_batch_size=arguments["global_batch_size"],
            micro_batches=lightning.get("accumulate_grad_batches", 1),
            max_device_batch_size=arguments["max_device_batch_size"],
            divides_samplers=lightning.get("use_distributed_sampler", True),
            reloads_data=bool(lightning.get("reload_dataloaders_every_n_epochs")),
        )
        check_batch_sizes(plan, user_callbacks)
        for callback in user_callbacks:
            if hasattr(callback, "save_to_log_dir"):  # LightningCLI's SaveConfigCallback, which is slow to import
                callback.overwrite = True  # a resumed run keeps its folder
        precision = lightning.get("precision")
        if self._is_fast:
            precision, self._precision_reason = layout.agree_on_precision(coordinator, world.accelerator, precision)
            if world.accelerator == "cuda":
                lightning = layout.use_fast_kernels(lightning)
        on_nan = arguments["on_nan"] or ("warn" if session.is_script else "stop")
        self._weights, self._checkpointing = FiniteWeights(channel, on_nan == "stop"), None
        if saves:
            retention = Retention(arguments["keep"], arguments["keep_best"])
            request_stop = channel.request_stop if arguments["save_errors"] == "stop" else None
            saving = (Interval.read(arguments["save_every"]), self._checkpoint_metadata, retention, request_stop)
            self._checkpointing = CheckpointCallback(self.run, *saving, self._weights)
        self._ledger, self._throughput = SampleLedger(plan), Throughput(plan)
        logger, run_logger = lightning.get("logger"), None
        if not barebones and not lightning.get("fast_dev_run") and (logger is None or logger):
            run_logger = DurableTensorBoardLogger(self.run)
        self._user_loggers = loggers = UserLoggers(self.run, run_logger)

        profile = ProfileRequest.read(arguments["profile"], arguments["profile_ranks"], world.size)
        monitor, activity, logs_system = channel.monitor, channel.monitor.activity, arguments["log_system"] == "yes"
        measured = (self.run, self._throughput, monitor)
        callbacks: list[Callback] = [
            self._ledger,
            *user_callbacks,
            self._throughput,
            SlowRanks(monitor, run_logger),
            IntervalMeasurements(*measured, self._checkpointing, run_logger, logs_system, self._weights),
            *([RunFigures(self.run, self._throughput, activity, run_logger, logs_system)] if self.run.is_kept else []),
            *([TensorBoardPage(self.run, self._config_so_far, plan, run_logger, loggers)] if run_logger else []),
            *([] if barebones else [self._weights]),
            *([Profile(self.run, profile, activity)] if profile else []),
            RankStates(plan),
            OptimizerOverrides(),
            LiveSettings(),
            *progress_callbacks(lightning, user_callbacks, world.launch.launcher),
            *filter(None, [self._checkpointing]),
        ]
        plugins.append(DirectoryCheckpointIO(self._options.trust_checkpoint))
        strategy = lightning.get("strategy", "auto")
        has_checkpoints = any(isinstance(callback, Checkpoint) for callback in callbacks)
        replaced: dict[str, Any] = {
            "accelerator": world.accelerator,
            "devices": 1 if world.accelerator == "cpu" else [world.index],
            "num_nodes": world.nodes,
            "precision": precision,
            "strategy": strategy_for(strategy, world, coordinator, plan, self._is_fast, self._compile == "step"),
            "plugins": [*plugins, LaunchEnvironment(world)],
            "callbacks": callbacks,
            "use_distributed_sampler": False,  # SamplingPlan distributes the samples
            "logger": run_logger if run_logger and logger in (None, True) else logger,
            "enable_checkpointing": has_checkpoints if saves else lightning.get("enable_checkpointing"),
        }
        self._initialize(**lightning | replaced)
        self._signal_connector = NoSignalConnector()  # type: ignore[assignment]
        choice = ChosenCheckpoint(self, self.run, self._checkpointing, coordinator)
        self._checkpoint_connector = self._checkpoint_choice = choice
        self.predict_loop = PredictionLoop(self, inference_mode=lightning.get("inference_mode", True))
        self._found_settings = KeepFound()
        wait = min(TIMERS.same_error, self._options.hang_timeout / 2) if session.is_script else 0
        # Lightning moves batch-size and learning-rate finders to the front; these callbacks must precede them.
        first = [fit_loop.install(self, plan, activity), ReportFailure(channel, self.outcome, wait)]
        self.callbacks: list[Callback] = [*first, self._found_settings, *self.callbacks]
        deadline = attempt_deadline(arguments["time_limit"], world.launch)
        safe_point = SafePoint(channel, deadline, self._checkpointing, self._weights)
        fit_loop.fit_loop_of(self).extra_subscribers += [RankAgreements(channel), safe_point]
        epoch_averages.install(self, run_logger)

    @refuses_wrong_arguments
    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: Path | str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains a model or resumes its training, see `lightning.pytorch.Trainer.fit`. All ranks must call.

        If the run is already finished, nothing is trained; the model receives the weights of the last checkpoint.
        A further call continues training, and is another part of the same run.

        Args:
            model: The model.
            train_dataloaders: Training loaders, unless the model or `datamodule` provides them.
            val_dataloaders: Validation loaders.
            datamodule: The data.
            ckpt_path: Checkpoint to resume from, in place of `resume`: a path, a URL, `last` or `best`.
            weights_only: False allows the checkpoint to run code, True does not; None applies `trust_checkpoint`.

        Raises:
            RequestError: The run cannot begin as requested; nothing was trained and no file of the attempt remains.
            Stopped: The run stopped early on all ranks, with its checkpoint saved; a SystemExit.
        """
        loaders = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
        settings: dict[str, Any] = {**loaders, "weights_only": weights_only}
        loop = fit_loop.fit_loop_of(self)
        self.plan.forget_loaders()
        loop.only_restores = False
        if is_tuning(self):
            check_batch_sizes(self.plan, self.callbacks)
            with without_files(self):
                super().fit(model, **settings)
            return
        if self._has_fitted and ckpt_path is None and loop.has_reached_limits:
            if self.is_global_zero:
                limits = f"max_epochs={self.max_epochs}" + f" or max_steps={self.max_steps}" * (self.max_steps != -1)
                print_notice(f"nothing to train: {limits} is reached; to train on, raise trainer.fit_loop.max_epochs")
            super().fit(model, **settings)  # nothing to train: not an attempt at the run
            return
        self.run.part += self._has_fitted
        self._has_fitted = False
        if ckpt_path == "last":  # Lightning looks for it in the folder of the logger's version
            self._user_loggers.continue_versions(self, False)
        attempt = self._prepare_attempt(model, datamodule or train_dataloaders, ckpt_path)
        loop.only_restores = attempt.already_finished
        checkpoint = as_given(attempt.checkpoint, ckpt_path)
        self._user_loggers.continue_versions(self, checkpoint is not None)
        if not attempt.already_finished:
            text = layout.apply_layout(model, self.session.world.accelerator) if self._is_fast else ""
            if text and self.is_global_zero:
                print_notice(f"--fast: {text}; {self._precision_reason}")
            if self._compile != "off" and self.run.is_kept:
                set_compile_cache(self.run.path.parent / ".compile")  # kept beside the runs, for the next start
            loop.epoch_loop.compiled_step = CompiledStep(self) if self._compile == "step" else None
            with compiled_model(self, model) if self._compile == "model" else nullcontext(model) as trained:
                train = partial(super().fit, trained, **settings, ckpt_path=checkpoint)
                attempt.train(train, may_exit=self.session.is_script and self.world_size == 1)
        elif self.session.is_script:
            attempt.restore(partial(super().fit, model, **settings, ckpt_path=checkpoint))
        self._has_fitted = True
        if self.session.is_script and isinstance(io := self.strategy.checkpoint_io, DirectoryCheckpointIO):
            io.kept |= {str(getattr(callback, "best_model_path", "")) for callback in self.checkpoint_callbacks}

    validate = refuses_wrong_arguments(pl.Trainer.validate)
    test = refuses_wrong_arguments(pl.Trainer.test)
    predict = refuses_wrong_arguments(pl.Trainer.predict)

    def _prepare_attempt(self, model: pl.LightningModule, data: Any, ckpt_path: Path | str | None) -> Attempt:
        options = self._options
        if ckpt_path is not None:
            options = replace(options, resume=self._checkpoint_choice.resolve(str(ckpt_path)) or "auto")
        elif self.outcome.has_started or self.run.part > 1:
            options = replace(options, resume="auto")
        vars(self.outcome).update(vars(Outcome(has_started=self.outcome.has_started)))
        tuned = self._found_settings.tuned
        self._stored_config = config = self.config or describe_config(model, data, self._explicit_arguments, tuned)
        seed = global_seed()
        own = [draw_seed() if seed is None else seed, seed is not None]
        agreed = self.session.coordinator.broadcast_object(own, "building data and model")
        self.plan.seed, self.plan.is_seeded = agreed
        if self._preflight == "full" or self.world_size > 1:
            from rankzero.preflight.all_checks import PlannedRun, check_before_fit

            limits = {"max_epochs": self.max_epochs, "max_steps": self.max_steps, "precision": self.precision}
            compared = flattened({name: value for name, value in config.items() if name != CONSTANTS})
            run = PlannedRun(model, data, self.plan, compared, self.run.path.parent, self._keep, limits)
            check_before_fit(self._preflight, self.session, run)
        display = ResultDisplay(self, self.run, self.session.world)
        attempt = Attempt(self.run, options, config, self, self.plan, self.outcome, self._counts, self.session, display)
        self._found_settings.awaits_checkpoint = attempt.checkpoint is not None
        return attempt

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this machine that the run uses, also those of other processes."""
        return list(self.session.requested.gpus or range(self.session.world.devices))

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The user's checkpoint callbacks; without any, Rankzero's, which takes the place of Lightning's default."""
        callbacks = super().checkpoint_callbacks
        return [callback for callback in callbacks if callback is not self._checkpointing] or callbacks

    def _config_so_far(self) -> Config:
        """Returns the configuration of the run; empty before training."""
        return self._stored_config or {}

    def _counts(self) -> dict[str, Any]:
        """Returns what the summary of the run states about its samples."""
        return {
            "problem": self._weights.problem,
            "samples": self._throughput.samples,
            "samples_per_second": float(f"{self._throughput.samples_per_second:.6g}"),
            "ledger": list(self._ledger.entries),
        }

    def _checkpoint_metadata(self) -> dict[str, Any]:
        """Returns the metadata of the run that a checkpoint stores beside the state."""
        return {
            "run": self.run.name,
            "id": self.run.id,
            "attempt": self.run.attempt,
            "metrics": metrics_of(self),
            "config": as_json(self._stored_config),
            "order": fit_loop.fit_loop_of(self).stored_order,
        }


def _agree_on_run(session: Session, arguments: dict[str, Any], lightning: dict[str, Any]) -> RunDirectory:
    """Returns the directory of the run, below `os.devnull` if a script's run writes no files. All ranks must call."""
    name, root, mirror = arguments["name"], arguments["root"], prose_without_secrets(arguments["mirror"] or "")
    if mirror and not name:
        found = "no --name: an automatic name may stand for another run on another disk"
        raise RequestError(f"--mirror {mirror}", found, f"--name NAME --mirror {mirror}")
    if session.is_script:
        has_outputs = lightning.get("logger") is not False or lightning.get("enable_checkpointing") is not False
        if lightning.get("barebones") or lightning.get("fast_dev_run") or not (has_outputs or arguments["profile"]):
            name, root = name or session.title, os.devnull
        elif root == TRAINER_FLAGS["root"].default:
            root = str(lightning.get("default_root_dir") or root)
    return agree_on_run(root, name, session.title, session.coordinator)
