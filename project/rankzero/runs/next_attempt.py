"""Next attempt at a run that has stopped early: asks the scheduler to requeue the job, or returns why not."""

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import current_job
from rankzero.distributed.scheduler.requeue import requeue
from rankzero.messages import TIME_LIMIT_REACHED, Stopped
from rankzero.runs.checkpoints.manifest import checkpoints_in, step_of
from rankzero.runs.directory import RunDirectory

ATTEMPTS_WITHOUT_PROGRESS = 3
"""After how many attempts in a row that complete no step the job is no longer requeued."""


def objection_to_next_attempt(run: RunDirectory, stopped: Stopped, max_attempts: int, has_trained: bool) -> str:
    """Returns why another attempt would not help; an empty string if it would.

    Args:
        run: Directory of the run.
        stopped: Exception that states why the run has stopped.
        max_attempts: Value of `--max_attempts`.
        has_trained: Whether this attempt has trained on a batch.
    """
    if not has_trained and stopped.reason == TIME_LIMIT_REACHED:
        return "the time limit is too short for a single step"
    if not checkpoints_in(run.checkpoints):
        return "there is no checkpoint, so the next attempt would restart from the beginning"
    if (step := step_without_progress(run)) is not None:
        return (
            f"the last {ATTEMPTS_WITHOUT_PROGRESS} attempts began at step {step} and saved no "
            "later step; their logs in logs/ may state why"
        )
    if run.attempt >= max_attempts:
        return f"this was attempt {run.attempt}, and --max_attempts is {max_attempts}"
    return ""


def step_without_progress(run: RunDirectory) -> int | None:
    """Returns the step at which the last attempts began, and which is still the last saved one; None after progress."""
    attempts = run.read("run.json").get("attempts") or []
    began = {attempt.get("step") for attempt in attempts[-ATTEMPTS_WITHOUT_PROGRESS:]}
    saved = {step_of(checkpoint) for checkpoint in checkpoints_in(run.checkpoints)[-1:]}
    return began.pop() if len(attempts) >= ATTEMPTS_WITHOUT_PROGRESS and began == saved else None


def request_next_attempt(run: RunDirectory, launch: Launch, objection: str) -> str:
    """Requests the next attempt and returns a message for the user, if any. Only rank zero calls this, after all saves.

    Args:
        run: Directory of the run.
        launch: How this process was started.
        objection: Result of `objection_to_next_attempt`.
    """
    if current_job(launch) is None:
        return ""
    if objection:
        return f"not requeued: {objection}"
    return requeue(launch, run.name)
