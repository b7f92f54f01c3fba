"""What a run carries on from: rank zero decides, all follow."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError, Stopped, nearest
from rankzero.runs.checkpoints.manifest import checkpoints_in, clean, newest_valid, read_manifest, verify
from rankzero.runs.checkpoints.safe_load import load, needs_trust, signed_sha256
from rankzero.runs.directory import RunDirectory
from rankzero.runs.lock import RunLock
from rankzero.runs.stored_config import Config, changes, classes_in, dump_config, read_config

T = TypeVar("T")

_EXAMPLE = "runs/NAME/checkpoints/step-00000100"


@dataclass(frozen=True)
class RunOptions:
    """How a run is resumed and continued: the Trainer's arguments of these names.

    Args:
        resume: `auto`, `never` or the path of a checkpoint.
        accept_changed: What may differ from the checkpoint: `data`, `global_batch_size`.
        trust_checkpoint: Whether a checkpoint may hold what can run any code.
        keep_best: `min:METRIC` or `max:METRIC`.
        requeue: `auto` or `never`.
        max_attempts: After how many attempts no other is asked for.
    """

    resume: str = "auto"
    accept_changed: tuple[str, ...] = ()
    trust_checkpoint: bool = False
    keep_best: str | None = None
    requeue: str = "auto"
    max_attempts: int = 100

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "RunOptions":
        """Reads the Trainer's arguments, as their flags have read them."""
        return cls(
            resume=arguments["resume"],
            accept_changed=tuple((arguments["accept_changed"] or "").split(",")),
            trust_checkpoint=arguments["trust_checkpoint"] == "yes",
            keep_best=arguments["keep_best"],
            requeue=arguments["requeue"],
            max_attempts=arguments["max_attempts"],
        )


@dataclass
class ResumePlan:
    """What rank zero decides and all ranks follow.

    Args:
        run: The run's directory.
        checkpoint: What to carry on from.
        manifest: What that checkpoint says of itself.
        notes: Lines for a person to read.
        already_finished: Whether there is nothing left to do.
        trusted_sha256: The sha256 of the checkpoint's state, where it may run code because a run of this user wrote it.
    """

    run: RunDirectory
    checkpoint: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    already_finished: bool = False
    trusted_sha256: str = ""

    @property
    def step(self) -> int:
        """The optimiser steps that were taken before."""
        return int(self.manifest.get("step") or 0)


def on_rank_zero(strategy: Strategy, rank: int | None, work: Callable[[], T]) -> T:
    """Rank zero decides, all follow; where it finds that it cannot, all raise. All ranks must call."""
    outcome: T | BaseException | None = None
    if rank == 0:
        try:
            outcome = work()
        except (CannotStart, Stopped) as error:
            outcome = error
        except Exception as error:  # a bug of ours, or a user's class: it may not survive the way to the others
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

    Where it returns, the lock is held. Before that, nothing of the run is touched.
    """
    run.check_writable()
    try:
        if run.title is None:  # otherwise its directory is one that does not exist yet
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
    plan = ResumePlan(run)
    resume = options.resume
    clean(run.checkpoints)
    again = launch.restarts and launch.job_id and run.started_by(launch.job_id)
    if resume != "auto" and again and (resume == "never" or newest_valid(run.checkpoints)[0]):
        plan.notes.append(f"--resume {resume} was for the first start of job {launch.job_id}; it is carried on")
        resume = "auto"
    if resume == "never":
        if run.exists:
            plan.notes.append(f"the earlier run {run.name} is kept as {run.archive()}")
    elif resume == "auto":
        plan.checkpoint, refused = newest_valid(run.checkpoints)
        plan.notes += [f"passed over: {reason}" for reason in refused]
    else:
        plan.checkpoint = given_checkpoint(resume)
    if plan.checkpoint:
        plan.manifest = read_description(plan.checkpoint, options.trust_checkpoint)
        if (names := plan.manifest.get("needs")) and not options.trust_checkpoint:
            plan.trusted_sha256 = signed_sha256(plan.manifest)
            if not plan.trusted_sha256:
                raise needs_trust(plan.checkpoint, names)
        if plan.manifest.get("rankzero") is None:
            plan.notes.append(f"{plan.checkpoint} is not ours: the epoch that it ends in begins anew")
    _check_same_training(plan, config)
    if stored := _stored_config(plan):
        plan.notes += changes(read_config(stored), config)
    if resume == "auto" and _reached(run.read("summary.json"), trainer):
        plan.already_finished = True
        plan.notes.append(already_finished_note(run))
    else:
        archive_newer(plan)
        run.begin_attempt(dump_config(config), launch.job_id)
    return plan


def read_description(checkpoint: Path, trusted: bool = False) -> dict[str, Any]:
    """What a checkpoint says of itself: its manifest, or as much of one as a .ckpt file holds."""
    if checkpoint.is_dir():
        return dict(read_manifest(checkpoint))
    try:
        content = load(checkpoint, trusted=trusted)
    except RequestError:  # loading it in earnest will say why
        return {"rankzero": {}}
    ours = content.get("rankzero") if isinstance(content.get("rankzero"), dict) else None
    return {"step": content.get("global_step"), "epoch": content.get("epoch"), "rankzero": ours}


def _stored_config(plan: ResumePlan) -> Any:
    """What the chosen checkpoint holds as its configuration; None if there is nothing."""
    return (plan.manifest.get("rankzero") or {}).get("config")


def _check_same_training(plan: ResumePlan, config: Config) -> None:
    """Raises a RequestError where a checkpoint is of another model or other data than what is asked for."""
    stored = _stored_config(plan)
    if stored is None:
        return
    was, asked = classes_in(read_config(stored)), classes_in(config)
    if not was:
        found = "its manifest does not say of which model and data it is"
        raise RequestError(f"the checkpoint {plan.checkpoint}", found, "the path of another checkpoint")
    if was != asked:
        raise RequestError(
            " ".join(f"--{name} {path}" for name, path in asked.items()) + f" for run {plan.run.name}",
            f"{plan.checkpoint} is of " + " and ".join(was.values()),
            " ".join(f"--{name} {path}" for name, path in was.items()) + ", or another --name NAME",
        )


def archive_newer(plan: ResumePlan) -> None:
    """Puts aside what a run has beyond the checkpoint that it carries on from: not lost, nor taken for newer."""
    folder = plan.run.checkpoints
    beyond = checkpoints_in(folder)
    if plan.checkpoint and plan.checkpoint.parent.resolve() == folder.resolve():
        beyond = beyond[[path.name for path in beyond].index(plan.checkpoint.name) + 1 :]
    if not beyond:
        return
    aside = plan.run.archive_checkpoints(beyond)
    plan.notes.append(f"checkpoints that are not carried on from are kept in {aside}")


def given_checkpoint(text: str) -> Path:
    """Finds the checkpoint that `--resume PATH` or `--checkpoint PATH` means: a checkpoint, or a run's directory.

    Raises:
        RequestError: There is none that is whole.
    """
    path = Path(text).expanduser()
    if not os.path.lexists(path):
        raise _no_such_checkpoint(text, path)
    if path.suffix == ".ckpt" and path.is_file():
        return path
    checkpoint, refused = newest_valid(path / "checkpoints")
    if checkpoint:
        return checkpoint
    try:
        verify(path)
    except (OSError, ValueError) as error:
        siblings = newest_valid(path.parent)[0]
        raise RequestError(
            f"the checkpoint {text}",
            "\n".join([*refused, str(error)]),
            str(siblings or f"the path of a checkpoint, such as {_EXAMPLE}"),
        ) from None
    return path


def _no_such_checkpoint(text: str, path: Path) -> RequestError:
    folder = path.parent
    if not folder.is_dir():
        found = f"there is no such file or folder, and no folder {folder}"
        return RequestError(f"the checkpoint {text}", found, f"the path of a checkpoint, such as {_EXAMPLE}")
    names_there = [other.name for other in folder.glob("*.ckpt")] + [other.name for other in checkpoints_in(folder)]
    names_there += [other.parent.name for other in folder.glob("*/run.json")]
    near = nearest(path.name, names_there) or (sorted(names_there)[-1] if names_there else None)
    names = f"; {folder.resolve()} holds {', '.join(sorted(names_there)[-8:])}" if names_there else ""
    within_run = newest_valid(folder / "checkpoints")[0]
    instead = str(folder / near if near else within_run or f"the path of a checkpoint, such as {_EXAMPLE}")
    return RequestError(f"the checkpoint {text}", f"there is no such file or folder{names}", instead)


def _reached(summary: dict[str, Any], trainer: Trainer) -> bool:
    """Whether a run is finished, and is asked for no more than it was then."""
    if summary.get("status") != "finished":
        return False

    def more(asked: int | None, had: int | None) -> bool:
        unlimited = (None, -1)
        return had not in unlimited and (asked in unlimited or int(asked or 0) > int(had or 0))

    return not more(trainer.max_epochs, summary.get("max_epochs")) and not more(
        trainer.max_steps, summary.get("max_steps")
    )


def already_finished_note(run: RunDirectory) -> str:
    """What a run says that has nothing left to do."""
    summary = run.read("summary.json")
    epochs, steps = summary["epochs"], summary["steps"]
    by_steps, most = summary.get("max_steps") == steps, summary.get("max_epochs") or -1
    ended_early = not by_steps and epochs < most
    more = f"--trainer.max_steps {steps * 2}" if by_steps else f"--epochs {max(epochs, most) * 2 or 1}"
    early = f" of {most}, ended early by a callback such as EarlyStopping" if ended_early else ""
    return (
        f"run {run.name} is already finished ({epochs} epochs{early}, {steps} steps; {run.path}).\n"
        f"  to go on:     the same command with {more}\n"
        f"  to start anew: the same command with --name ANOTHER-NAME, or with --resume never"
    )
