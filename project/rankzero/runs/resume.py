"""Choice of the checkpoint that a run resumes from: rank zero decides, all ranks follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError, Stopped
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.checkpoints.manifest import (
    VerifiedState,
    checkpoints_in,
    clean,
    newest_valid,
    open_newest,
    read_manifest,
)
from rankzero.runs.checkpoints.requested import requested_checkpoint
from rankzero.runs.checkpoints.safe_load import load, needs_trust_error, signed_sha256
from rankzero.runs.directory import RunDirectory
from rankzero.runs.lock import RunLock
from rankzero.runs.stored_config import Config, changes, classes_in, dump_config, read_config

T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """Options for resuming and requeuing a run: the Trainer's arguments of the same names.

    Args:
        resume: `auto`, `never` or the path of a checkpoint.
        accept_changed: Settings that may differ from the checkpoint: `data`, `global_batch_size`.
        trust_checkpoint: Whether to read a checkpoint that can run any code.
        keep_best: `min:METRIC` or `max:METRIC`.
        requeue: `auto` or `never`.
        max_attempts: Number of attempts after which no further attempt is requested.
        hang_timeout: Seconds without progress after which a run hangs.
        hang_action: `stop` or `report`.
    """

    resume: str = "auto"
    accept_changed: tuple[str, ...] = ()
    trust_checkpoint: bool = False
    keep_best: str | None = None
    requeue: str = "auto"
    max_attempts: int = 100
    hang_timeout: float = 300.0
    hang_action: str = "stop"

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "RunOptions":
        """Creates the options from the Trainer's arguments, after their flags have parsed them."""
        return cls(
            resume=arguments["resume"],
            accept_changed=tuple((arguments["accept_changed"] or "").split(",")),
            trust_checkpoint=arguments["trust_checkpoint"] == "yes",
            keep_best=arguments["keep_best"],
            requeue=arguments["requeue"],
            max_attempts=arguments["max_attempts"],
            hang_timeout=arguments["hang_timeout"],
            hang_action=arguments["hang_action"],
        )


@dataclass
class ResumePlan:
    """Plan for resuming a run, which rank zero makes and all ranks follow.

    Args:
        run: Directory of the run.
        checkpoint: Checkpoint to resume from; None to start from the beginning.
        manifest: Manifest of that checkpoint; empty without a checkpoint.
        notes: Lines to print for the user: what differs from the request or from the previous attempt.
        notices: Lines to print that require no action, which `--quiet` omits.
        already_finished: Whether nothing is left to train.
        trusted_sha256: sha256 of a state that may run code because a run of this user wrote it; otherwise empty.
    """

    run: RunDirectory
    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    already_finished: bool = False
    trusted_sha256: str = ""

    @property
    def step(self) -> int:
        """Number of optimizer steps up to the checkpoint."""
        return int(self.manifest.get("step") or 0)


def run_on_rank_zero(strategy: Strategy, rank: int | None, work: Callable[[], T]) -> T:
    """Runs `work` on rank zero; all ranks return its result or raise its error. All ranks must call."""
    outcome: T | BaseException | None = None
    if rank == 0:
        try:
            outcome = work()
        except (CannotStart, Stopped) as error:
            outcome = error
        except Exception as error:  # a bug or a user's error, whose class may not survive pickling
            outcome = RuntimeError(f"rank zero failed: {error!r}")
            outcome.__cause__ = error
    outcome = strategy.broadcast(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    assert outcome is not None
    return outcome


def choose_resume_point(
    run: RunDirectory, options: RunOptions, config: Config, trainer: Trainer, launch: Launch, lock: RunLock
) -> ResumePlan:
    """Chooses the checkpoint to resume from, and begins the attempt. Only rank zero calls this.

    On return, this process holds the lock. Files of an existing run are not changed before the lock is taken.
    """
    run.check_writable()
    try:
        if run.title is None:  # otherwise `_choose_resume_point` creates a new directory
            lock.acquire(run.path)
        plan = _choose_resume_point(run, options, config, trainer, launch)
        if run.title is not None:
            lock.acquire(run.path)
    except BaseException:
        lock.release()
        raise
    return plan


def _choose_resume_point(
    run: RunDirectory, options: RunOptions, config: Config, trainer: Trainer, launch: Launch
) -> ResumePlan:
    plan, resume = ResumePlan(run), options.resume
    clean(run.checkpoints)
    is_restart = launch.restarts and launch.job_id and run.was_started_by(launch.job_id)
    if resume != "auto" and is_restart and (resume == "never" or newest_valid(run.checkpoints)[0]):
        plan.notes.append(f"--resume {resume} applied to the first start of job {launch.job_id}; the run resumes")
        resume = "auto"
    if resume == "never":
        if run.exists:
            plan.notices.append(f"the earlier run {run.name} is kept as {run.archive()}")
    elif resume == "auto":
        state, refusals = open_newest(run.checkpoints)
        plan.checkpoint = keep_for_loading(trainer, state)
        plan.notes += [f"skipped: {reason}" for reason in refusals]
    else:
        plan.checkpoint = requested_checkpoint(resume, partial(keep_for_loading, trainer))
    if plan.checkpoint:
        plan.manifest = read_description(plan.checkpoint, options.trust_checkpoint)
        if (names := plan.manifest.get("needs")) and not options.trust_checkpoint:
            plan.trusted_sha256 = signed_sha256(plan.manifest)
            if not plan.trusted_sha256:
                raise needs_trust_error(plan.checkpoint, names)
        if plan.manifest.get("rankzero") is None:
            note = "was not written by Rankzero: its last epoch restarts from the beginning"
            plan.notes.append(f"{plan.checkpoint} {note}")
    _check_same_training(plan, config)
    if stored := _stored_config(plan):
        plan.notes += changes(read_config(stored), config)
    summary = run.read("summary.json")
    is_finished = resume == "auto" and _has_reached_limits(summary, trainer)
    plan.already_finished = is_finished and plan.checkpoint is not None and plan.step >= summary["steps"]
    if plan.already_finished:
        plan.notes.append(already_finished_note(run, trainer))
    else:
        if is_finished:
            next_start = "it resumes from the newest" if plan.checkpoint else "it starts from the beginning"
            plan.notes.append(f"run {run.name} is finished, but has no checkpoint of its last step; {next_start}")
        archive_newer(plan)
        run.begin_attempt(dump_config(config), launch.job_id, plan.step)
    return plan


def read_description(checkpoint: Path, trusted: bool = False) -> dict[str, Any]:
    """Returns the manifest of a checkpoint directory, or the same entries of a .ckpt file as far as it has them."""
    if checkpoint.is_dir():
        return dict(read_manifest(checkpoint))
    try:
        content = load(checkpoint, trusted=trusted)
    except RequestError:  # loading the checkpoint later raises this error again
        return {"rankzero": {}}
    record = content.get("rankzero") if isinstance(content.get("rankzero"), dict) else None
    return {"step": content.get("global_step"), "epoch": content.get("epoch"), "rankzero": record}


def _stored_config(plan: ResumePlan) -> Any:
    """Returns the configuration that the chosen checkpoint stores; None if there is none."""
    return (plan.manifest.get("rankzero") or {}).get("config")


def _check_same_training(plan: ResumePlan, config: Config) -> None:
    """Raises a RequestError if the checkpoint belongs to another model or data class than requested."""
    stored = _stored_config(plan)
    if stored is None:
        return
    stored_classes, requested_classes = classes_in(read_config(stored)), classes_in(config)
    if not stored_classes:
        found = "its manifest does not name the model and the data module"
        raise RequestError(f"the checkpoint {plan.checkpoint}", found, "the path of another checkpoint")
    if stored_classes != requested_classes:
        raise RequestError(
            " ".join(f"--{name} {path}" for name, path in requested_classes.items()) + f" for run {plan.run.name}",
            f"{plan.checkpoint} was saved with " + " and ".join(stored_classes.values()),
            " ".join(f"--{name} {path}" for name, path in stored_classes.items()) + ", or another --name NAME",
        )


def archive_newer(plan: ResumePlan) -> None:
    """Archives the run's checkpoints that come after the chosen one, or all if none of them was chosen.

    Archived checkpoints are not lost, and no later attempt takes them for the newest.
    """
    folder = plan.run.checkpoints
    unused = checkpoints_in(folder)
    if plan.checkpoint and plan.checkpoint.parent.resolve() == folder.resolve():
        unused = unused[[path.name for path in unused].index(plan.checkpoint.name) + 1 :]
    if not unused:
        return
    archive_folder = plan.run.archive_checkpoints(unused)
    plan.notices.append(f"checkpoints from which the run does not resume are kept in {archive_folder}")


def keep_for_loading(trainer: Trainer, state: VerifiedState | None) -> Path | None:
    """Lets the Trainer load a state that has been read, without reading it again; returns its path."""
    io = trainer.strategy.checkpoint_io
    if isinstance(io, DirectoryCheckpointIO):
        io.verified = state
    return state.checkpoint if state else None


def _has_reached_limits(summary: dict[str, Any], trainer: Trainer) -> bool:
    """Returns whether a run is finished, and this start requests no more epochs or steps than it had then."""
    if summary.get("status") != "finished":
        return False
    limits = _limits(summary, trainer)
    if all(stored is None for _, _, stored, _ in limits):  # ended by something else, such as `max_time`
        return any(requested is not None and count >= requested for _, count, _, requested in limits)
    return not any(
        stored is not None and (requested is None or requested > stored) for _, _, stored, requested in limits
    )


def _limits(summary: dict[str, Any], trainer: Trainer) -> list[tuple[str, int, int | None, int | None]]:
    """Returns, for epochs and for steps: flag, number done, limit then, limit now. None means unlimited."""
    return [
        (flag, summary[count_key], *(None if limit in (None, -1) else limit for limit in (summary.get(key), requested)))
        for flag, count_key, key, requested in (
            ("--epochs", "epochs", "max_epochs", trainer.max_epochs),
            ("--trainer.max_steps", "steps", "max_steps", trainer.max_steps),
        )
    ]


def already_finished_note(run: RunDirectory, trainer: Trainer) -> str:
    """Returns the note for a run that has nothing left to train."""
    summary = run.read("summary.json")
    limits = _limits(summary, trainer)
    effective = [(flag, count, requested if stored is None else stored) for flag, count, stored, requested in limits]
    limited = [(flag, count, limit) for flag, count, limit in effective if limit is not None]
    reached = [(flag, count, limit) for flag, count, limit in limited if count >= limit]
    raised_limits = " ".join(f"{flag} {max(count, limit) * 2 or 1}" for flag, count, limit in reached or limited[:1])
    epochs = summary["epochs"]
    progress = f"{epochs} epoch{'s' * (epochs != 1)}, {summary['steps']} steps"
    reason = "" if reached else "; stopped early by a callback such as EarlyStopping, or by max_time"
    return (
        f"run {run.name} is already finished ({progress}{reason}; {run.path}).\n"
        f"  to continue:    the same command with {raised_limits}\n"
        f"  to start again: the same command with --name ANOTHER-NAME, or with --resume never"
    )
