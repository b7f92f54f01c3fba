"""Contents of `summary.json` and `environment.json`, which describe an attempt."""

import platform
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from rankzero import __version__
from rankzero.checkpoints.manifest import Retention, checkpoints_in, has_valid_manifest
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.process.spawn import own_command
from rankzero.distributed.process.user_traceback import user_frames
from rankzero.distributed.stop_and_failure.channel import ControlChannel
from rankzero.distributed.timers import TIMERS
from rankzero.distributed.world import World
from rankzero.messages import Stopped, is_peer_failure, place_of, printable_line, user_message
from rankzero.runs.directory import RunDirectory
from rankzero.runs.secrets import command_without_secrets, prose_without_secrets
from rankzero.text import finite_or_none, numbers


def summarize(
    status: str,
    reason: str | None,
    run: RunDirectory,
    trainer: Trainer,
    world: World,
    keep_best: str | None,
    **facts: Any,
) -> dict[str, Any]:
    """Returns the summary of the whole run; only `seconds` and `samples_per_second` are of this attempt alone.

    `facts` contains what the attempt has counted and measured, and `metrics` if those of the Trainer cannot be read.
    """

    def relative_path(checkpoint: Path | None) -> str | None:
        return str(checkpoint.relative_to(run.path)) if checkpoint else None

    return {
        "run": run.name,
        "status": status,
        "reason": reason and prose_without_secrets(reason),
        "another_attempt": False,
        **facts,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "world_size": world.size,
        "nodes": world.nodes,
        "devices": world.devices,
        "launcher": world.launch.launcher,
        "accelerator": world.accelerator,
        "backend": world.backend if world.size > 1 else None,
        "metrics": facts["metrics"] if "metrics" in facts else metrics_of(trainer),
        "attempts": run.attempt,
        "part": run.part,
        "checkpoint": relative_path(next(filter(has_valid_manifest, reversed(checkpoints_in(run.checkpoints))), None)),
        "best": relative_path(Retention(best=keep_best).best_in(run.checkpoints)),
        "can_validate": is_overridden("validation_step", trainer.lightning_module),
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
    }


def start_line(run: RunDirectory, session: Session, checkpoint: Path | str | None) -> str:
    """Returns the line printed at the start: launcher and its evidence, processes, devices, run and checkpoint."""
    world, launch = session.world, session.world.launch
    processes = f"{launch.shape} on {world.accelerator}{', GPUs shared' * world.shares_gpu}"
    threads = f", {threads_text(world)} ({world.threads})"
    backend = f", {world.backend}, rendezvous at {launch.address}:{launch.port}" if world.size > 1 else ""
    resumed = f", resuming from {Path(checkpoint).name}" if checkpoint else ""
    started = f"{processes}{threads}{backend}; run {run.location}{resumed}"
    return f"{launch.launcher} ({printable_line(launch.evidence)}): {started}"


def threads_text(world: World) -> str:
    """Returns torch's number of threads in this process, such as `2 threads each`."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}{' each' * (world.size > 1)}"


def reason_of(error: BaseException | None, channel: ControlChannel) -> str | None:
    """Returns why an attempt has stopped or failed, as it was printed; None if it has finished."""
    if error is None:
        return None
    if isinstance(error, Stopped):
        return error.reason
    if is_peer_failure(error) and (cause := channel.failure_cause(TIMERS.cause)):
        return cause
    place = f"\nin {place_of(error)}" if place_of(error) else ""
    return (user_message(error) or "".join(user_frames(error)).strip()) + place


def without_stack(cause: str) -> str:
    """Returns the cause of a failure without the stack of this process, which the log contains."""
    return re.split(r'(; the main thread was at)?\n  File "', cause, maxsplit=1)[0]


def metrics_of(trainer: Trainer) -> dict[str, float | None]:
    """Returns the Trainer's metrics, with None in place of NaN and infinity."""
    return finite_or_none(numbers(dict(sorted(trainer.callback_metrics.items()))))


def computed_metrics_of(trainer: Trainer) -> dict[str, float | None]:
    """Returns those of the Trainer's metrics that are already in this process's memory.

    `metrics_of` may communicate with other ranks or wait for an accelerator; if a rank is lost, neither may ever end.
    """
    # A copy: the main thread may change them.
    metrics: dict[str, Any] = dict(trainer.fit_loop.computed_metrics)  # type: ignore[attr-defined]
    on_device = {name for name, value in metrics.items() if isinstance(value, Tensor) and value.device.type != "cpu"}
    return finite_or_none(numbers({name: metrics[name] for name in sorted(metrics.keys() - on_device)}))


def has_reached_limits(summary: dict[str, Any], trainer: Trainer) -> bool:
    """Returns whether a run is finished, and this start requests no more epochs or steps than it had then."""
    if summary.get("status") != "finished":
        return False
    limits = _limits(summary, trainer)
    if all(stored is None for _, _, stored, _ in limits):  # ended by something else, such as `max_time`
        return any(requested is not None and count >= requested for _, count, _, requested in limits)
    return all(stored is None or (requested is not None and requested <= stored) for _, _, stored, requested in limits)


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
    """Returns the note for a run, or for a part of it, that has nothing left to train."""
    summary = run.summary_of_part()
    limits = _limits(summary, trainer)
    effective = [(flag, count, requested if stored is None else stored) for flag, count, stored, requested in limits]
    limited = [(flag, count, limit) for flag, count, limit in effective if limit is not None]
    reached = [(flag, count, limit) for flag, count, limit in limited if count >= limit]
    raised_limits = " ".join(f"{flag} {max(count, limit) * 2 or 1}" for flag, count, limit in reached or limited[:1])
    epochs = summary["epochs"]
    progress = f"{epochs} epoch{'s' * (epochs != 1)}, {summary['steps']} steps"
    reason = "" if reached else "; stopped early by a callback such as EarlyStopping, or by max_time"
    if run.newest_attempt.get("part", 1) > run.part:
        return f"part {run.part} of run {run.name} is already finished ({progress}{reason})"
    how = f"the same command with {raised_limits}"
    if run.part > 1:
        how = "a larger trainer.fit_loop.max_epochs or max_steps before this fit"
    return (
        f"run {run.name} is already finished ({progress}{reason}; {run.path}).\n"
        f"  to continue:    {how}\n"
        f"  to start again: the same command with --name ANOTHER-NAME, or with --resume never"
    )


def describe_environment(session: Session) -> dict[str, Any]:
    """Returns the environment of an attempt as JSON can represent it, without secrets of the command line."""
    world, launch = session.world, session.world.launch
    is_cuda = world.accelerator == "cuda"
    return {
        "command": command_without_secrets(own_command()),
        "is_script": session.is_script,
        "folder": str(Path.cwd()),
        "commit": git_commit(Path.cwd()),
        "launcher": launch.launcher,
        "launcher_evidence": launch.evidence,
        "hosts": dict(Counter(world.hosts)),
        "device": torch.cuda.get_device_name(world.index) if is_cuda else f"{world.accelerator} ({platform.machine()})",
        "backend": world.backend if world.size > 1 else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": lightning.__version__,
        "rankzero": __version__,
        "platform": platform.platform(),
    }


def git_commit(folder: Path) -> str | None:
    """Returns the git commit of a folder, with a note if tracked files have changed since; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=TIMERS.optional).strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with changes that are not committed" if changed else commit
