"""Choice of the checkpoint that a run resumes from: rank zero decides, all ranks follow."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import (
    VerifiedState,
    checkpoints_in,
    clean,
    directory_of,
    newest_valid,
    open_newest,
    open_verified,
    read_manifest,
)
from rankzero.checkpoints.safe_load import is_remote, load, needs_trust_error, signed_sha256
from rankzero.distributed.environments.launch import Launch
from rankzero.messages import CannotStart, RequestError, Stopped, is_quiet, nearest
from rankzero.runs.directory import RunDirectory, expanded
from rankzero.runs.lock import RunLock
from rankzero.runs.stored_config import Config, changed_settings, classes_in, config_in, data_limits, dump_config
from rankzero.runs.summary import already_finished_note, has_reached_limits

T = TypeVar("T")

_EXAMPLE = "the path of a checkpoint, such as runs/NAME/checkpoints/step-00000100"


class NoCheckpointError(RequestError, FileNotFoundError):
    """The requested checkpoint does not exist; a script can catch a FileNotFoundError, as with Lightning."""


@dataclass(frozen=True)
class RunOptions:
    """Options for resuming and requeuing a run: the Trainer's arguments of the same names."""

    resume: str = "auto"
    mirror: str | None = None
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
        given = {item.name: arguments[item.name] for item in fields(cls)}
        given["accept_changed"] = tuple((arguments["accept_changed"] or "").split(","))
        given["trust_checkpoint"] = arguments["trust_checkpoint"] == "yes"
        return cls(**given)


@dataclass
class ResumePlan:
    """Plan for resuming a run from a checkpoint, if any, which rank zero makes and all ranks follow.

    `notes` are lines to print for the user: what differs from the request or from the previous attempt. `--quiet` omits
    the `notices`. If `begins_part`, a later part of the run begins at a requested checkpoint, possibly with other data.
    A state whose sha256 is `trusted_sha256` may run code, because a run of this user wrote it.
    """

    run: RunDirectory
    checkpoint: Path | str | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    already_finished: bool = False
    begins_part: bool = False
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
        # With a mirror, the run is locked already; an unnamed run gets a new directory in `_choose_resume_point`.
        if run.title is None and run.is_kept and not options.mirror:
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
    is_in_this_process = run.newest_attempt.get("number") == run.attempt
    if run.part > 1 and resume != "auto" and not is_in_this_process and checkpoints_in(run.checkpoints, run.part):
        plan.notes.append(f"{resume} was the start of part {run.part} of run {run.name}, which resumes")
        resume = "auto"
    is_repeated = resume != "auto" and is_restart(launch, run.newest_attempt)
    if is_repeated and (resume == "never" or newest_valid(run.checkpoints)[0]):
        plan.notes.append(f"--resume {resume} applied to the first start of job {launch.job_id}; the run resumes")
        resume = "auto"
    if resume == "never":
        if run.exists:
            plan.notices.append(f"the earlier run {run.name} is kept as {run.archive()}")
    elif resume == "auto":
        state, refusals = open_newest(run.checkpoints, first_part=run.part, last_part=run.part)
        plan.checkpoint = keep_for_loading(trainer, state)
        plan.notes += [f"skipped: {reason}" for reason in refusals]
    else:
        keep = partial(keep_for_loading, trainer)
        plan.checkpoint = existing_url(resume) if is_remote(resume) else requested_checkpoint(resume, keep)
        plan.begins_part = run.part > 1
    if plan.checkpoint:
        plan.manifest = read_description(plan.checkpoint, options.trust_checkpoint)
        if (names := plan.manifest.get("needs")) and not options.trust_checkpoint:
            plan.trusted_sha256 = signed_sha256(plan.manifest)
            if not plan.trusted_sha256:
                raise needs_trust_error(plan.checkpoint, names)
        if plan.manifest.get("rankzero") is None:
            text = "was not written by Rankzero: its last epoch restarts from the beginning, unless it was complete"
            plan.notes.append(f"{plan.checkpoint} {text}")
    _check_same_training(plan, config)
    if (stored := config_in(plan.manifest)) and (changed := changed_settings(stored, config)):
        plan.notes.append(f"changed since the checkpoint: {', '.join(changed)}")
    summary = run.summary_of_part()
    is_finished = resume == "auto" and has_reached_limits(summary, trainer)
    plan.already_finished = is_finished and plan.checkpoint is not None and plan.step >= summary["steps"]
    if resume == "auto" and stored:
        _check_settings(plan, stored, config)
    epochs = summary["epochs"] if plan.already_finished else plan.manifest.get("epoch") or 0
    if resume == "auto" and trainer.max_epochs not in (None, -1) and trainer.max_epochs < epochs:
        found = f"run {run.name} has trained {epochs} epoch{'s' * (epochs != 1)}"
        least = epochs + (not plan.already_finished)
        raise RequestError(f"--epochs {trainer.max_epochs}", found, f"--epochs {least}, or --name ANOTHER-NAME")
    if plan.already_finished:
        note = already_finished_note(run, trainer)
        plan.notes.append(note.partition("\n")[0] if is_quiet() else note)
    else:
        if is_finished:
            next_start = "it resumes from the newest" if plan.checkpoint else "it starts from the beginning"
            plan.notes.append(f"run {run.name} is finished, but has no checkpoint of its last step; {next_start}")
        archive_newer(plan)
        run.begin_attempt(dump_config(config), launch.job_id, plan.step if plan.checkpoint else trainer.global_step)
    return plan


def is_restart(launch: Launch, newest_attempt: Mapping[str, Any]) -> bool:
    """Returns whether the scheduler has restarted the job that began the newest attempt at a run."""
    return bool(launch.restarts and launch.job_id and newest_attempt.get("job") == launch.job_id)


def read_description(checkpoint: Path | str, trusted: bool = False) -> dict[str, Any]:
    """Returns the manifest of a checkpoint directory, or the same entries of a .ckpt file as far as it has them."""
    if isinstance(checkpoint, Path) and checkpoint.is_dir():
        return dict(read_manifest(checkpoint))
    try:
        content = load(checkpoint, trusted=trusted)
    except RequestError:  # loading the checkpoint later raises this error again
        return {"rankzero": {}}
    record = content.get("rankzero") if isinstance(content.get("rankzero"), dict) else None
    epoch = content.get("epoch")
    with suppress(LookupError, TypeError):  # not a checkpoint of Lightning
        loop = content["loops"]["fit_loop"]
        counts = loop["epoch_progress"]["current"]
        is_complete = loop["epoch_loop.batch_progress"]["is_last_batch"] and counts["started"] > counts["completed"]
        if not record and type(epoch) is int and is_complete:
            epoch += 1
    return {"step": content.get("global_step"), "epoch": epoch, "rankzero": record}


def _check_same_training(plan: ResumePlan, config: Config) -> None:
    """Raises a RequestError if the checkpoint belongs to another model or data class than requested."""
    stored_classes, requested_classes = classes_in(config_in(plan.manifest)), classes_in(config)
    if stored_classes and stored_classes != requested_classes:
        both = (requested_classes, stored_classes)
        asked, instead = (" ".join(f"--{name} {path}" for name, path in classes.items()) for classes in both)
        found = f"{plan.checkpoint} was saved with {' and '.join(stored_classes.values())}"
        raise RequestError(f"{asked} for run {plan.run.name}", found, f"{instead}, or another --name NAME")


def _check_settings(plan: ResumePlan, stored: Config, config: Config) -> None:
    """Refuses another training under the name of a finished run, and to resume a run with another amount of data.

    Raises:
        RequestError: A setting differs, so that the run would not be the one that was requested.
    """
    name, advice = plan.run.name, "--name NAME with another name, or --resume never to start this run again"
    if plan.already_finished and (changed := changed_settings(stored, config, only_results=True)):
        found = f"the run is finished, and was trained with other settings: {', '.join(changed)}"
        raise RequestError(f"run {name} with these settings", found, f"{advice}, or more epochs to continue it")
    before, now = data_limits(stored), data_limits(config)
    if before != now:
        limits = [" ".join(f"--{flag} {value}" for flag, value in one.items()) or "all data" for one in (now, before)]
        found = f"it has {plan.step} steps with {limits[1]}, which are not the beginning of this run"
        raise RequestError(f"to resume run {name} with {limits[0]}", found, advice)


def archive_newer(plan: ResumePlan) -> None:
    """Archives checkpoints of this part and later ones that come after the chosen one, or all if it is none of them.

    Archived checkpoints are not lost, and no later attempt takes them for the newest.
    """
    folder, chosen = plan.run.checkpoints, plan.checkpoint
    unused = checkpoints_in(folder, plan.run.part)
    names = [path.name for path in unused]
    if isinstance(chosen, Path) and chosen.parent.resolve() == folder.resolve() and chosen.name in names:
        unused = unused[names.index(chosen.name) + 1 :]
    if unused:
        archive_folder = plan.run.archive_checkpoints(unused)
        plan.notices.append(f"checkpoints from which the run does not resume are kept in {archive_folder}")


def keep_for_loading(trainer: Trainer, state: VerifiedState | None) -> Path | None:
    """Lets the Trainer load a state that has been read, without reading it again; returns its path."""
    io = trainer.strategy.checkpoint_io
    if isinstance(io, DirectoryCheckpointIO):
        io.verified = state
    return state.checkpoint if state else None


def unfinished_before(run: RunDirectory) -> str | None:
    """Returns the name of the numbered run before an unnamed run, if it has ended with a checkpoint, not finished."""
    from rankzero.runs.recorded_run import FINISHED, RUNNING, read_run, status_of

    base, _, number = run.name.rpartition("-")
    if run.title != base or not number.isdecimal():
        return None
    earlier = RunDirectory(run.path.with_name(f"{base}-{int(number) - 1}"))
    if not checkpoints_in(earlier.checkpoints) or status_of(read_run(earlier.path)).word in (FINISHED, RUNNING):
        return None
    return earlier.name


def existing_url(url: str) -> str:
    """Returns the URL of a checkpoint file.

    Raises:
        RequestError: There is no such file, or its protocol cannot be read.
    """
    try:
        if get_filesystem(url).exists(url):
            return url
    except (ImportError, ValueError) as error:
        raise RequestError(f"the checkpoint {url}", str(error), "the path of another checkpoint") from None
    raise NoCheckpointError(f"the checkpoint {url}", "there is no such file", "the URL of another checkpoint")


def requested_checkpoint(text: str, keep: Callable[[VerifiedState], object] | None = None) -> Path:
    """Returns the checkpoint at the path of `--resume` or `--checkpoint`; in a run's directory, the newest valid one.

    `keep` is called with the state of a checkpoint directory, which has been read; by default, the state is closed.

    Raises:
        RequestError: There is no valid checkpoint at this path.
    """
    path = directory_of(expanded(text))
    if not os.path.lexists(path):
        raise _no_such_checkpoint_error(text, path)
    if path.is_file():
        return path
    in_memory = None if keep else False
    state, refusals = open_newest(path / "checkpoints", in_memory)
    try:
        state = state or open_verified(path, in_memory)
    except (OSError, ValueError) as error:
        found, sibling = "\n".join([*refusals, str(error)]), newest_valid(path.parent)[0]
        raise RequestError(f"the checkpoint {text}", found, str(sibling or _EXAMPLE)) from None
    if keep:
        keep(state)
    else:
        state.file.close()
    return state.checkpoint


def _no_such_checkpoint_error(text: str, path: Path) -> NoCheckpointError:
    folder = path.parent
    if not folder.is_dir():
        found = f"there is no such file or folder, and no folder {folder}"
        return NoCheckpointError(f"the checkpoint {text}", found, _EXAMPLE)
    existing_names = [entry.name for entry in folder.glob("*.ckpt")] + [entry.name for entry in checkpoints_in(folder)]
    existing_names += [entry.parent.name for entry in folder.glob("*/run.json")]
    similar = nearest(path.name, existing_names)
    names = f"; {folder.resolve()} contains {', '.join(sorted(existing_names)[-8:])}" if existing_names else ""
    newest_in_run = newest_valid(folder / "checkpoints")[0]
    instead = str(folder / similar if similar else newest_in_run or _EXAMPLE)
    return NoCheckpointError(f"the checkpoint {text}", f"there is no such file or folder{names}", instead)
