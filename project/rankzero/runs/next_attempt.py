"""What happens to a run that has stopped before its end: the scheduler runs its job again, or a person is told."""

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.scheduler.job import job_around
from rankzero.distributed.scheduler.requeue import Requeue, requeue
from rankzero.messages import TIME_IS_UP, Stopped
from rankzero.runs.checkpoints.manifest import checkpoints_in
from rankzero.runs.directory import RunDirectory


def why_not_again(run: RunDirectory, stopped: Stopped, most: int, begun: bool) -> str:
    """Why another attempt would not help; empty where it would.

    Args:
        run: The run.
        stopped: Why the run has stopped.
        most: `--max_attempts`.
        begun: Whether this attempt has trained at all.
    """
    if not begun and stopped.reason == TIME_IS_UP:
        return "not a single step fits into the time that there is"
    if not checkpoints_in(run.checkpoints):
        return "nothing is saved, so that the next attempt would begin anew"
    if run.attempt >= most:
        return f"this was attempt {run.attempt}, and --max_attempts is {most}"
    return ""


def next_attempt(run: RunDirectory, launch: Launch, against: str) -> str:
    """Asks for the next attempt; returns what a person is told, if anything. For rank zero alone, as the last thing.

    Args:
        run: The run.
        launch: How this process was started.
        against: What `why_not_again` says.
    """
    if job_around(launch) is None:
        return ""
    if against:
        return f"not requeued: {against}"
    outcome = requeue(launch, run.name)
    return f"not requeued\n{outcome.message}" if outcome.requeue is Requeue.REFUSED else outcome.message
