"""Next attempt at a run that has stopped early: asks the scheduler to requeue the job, or returns why not."""

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import job_around
from rankzero.distributed.scheduler.requeue import Requeue, requeue
from rankzero.messages import TIME_IS_UP, Stopped
from rankzero.runs.checkpoints.manifest import checkpoints_in
from rankzero.runs.directory import RunDirectory


def why_not_again(run: RunDirectory, stopped: Stopped, most: int, begun: bool) -> str:
    """Returns why another attempt would not help; an empty string if it would.

    Args:
        run: Directory of the run.
        stopped: Exception that states why the run has stopped.
        most: Value of `--max_attempts`.
        begun: Whether this attempt has trained on a batch.
    """
    if not begun and stopped.reason == TIME_IS_UP:
        return "not a single step fits into the time that there is"
    if not checkpoints_in(run.checkpoints):
        return "nothing is saved, so that the next attempt would begin anew"
    if run.attempt >= most:
        return f"this was attempt {run.attempt}, and --max_attempts is {most}"
    return ""


def next_attempt(run: RunDirectory, launch: Launch, against: str) -> str:
    """Requests the next attempt and returns a message for the user, if any. Only rank zero calls this, at the very end.

    Args:
        run: Directory of the run.
        launch: How this process was started.
        against: Result of `why_not_again`.
    """
    if job_around(launch) is None:
        return ""
    if against:
        return f"not requeued: {against}"
    outcome = requeue(launch, run.name)
    return f"not requeued\n{outcome.message}" if outcome.requeue is Requeue.REFUSED else outcome.message
