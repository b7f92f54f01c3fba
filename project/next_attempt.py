"""What happens to a run that has stopped before its end: the scheduler runs its job again, or a person is told."""

from project.checkpoints.manifest import checkpoints_in
from project.environments.allocation import job_around
from project.environments.launch import Launch
from project.environments.requeue import Requeue, requeue
from project.errors import TIME_IS_UP, Stopped
from project.run_directory import RunDirectory


def next_attempt(run: RunDirectory, launch: Launch, stopped: Stopped, how: str, most: int, begun: bool) -> str:
    """Asks for the next attempt; returns what a person is told, if anything. For rank zero alone, as the last thing.

    Args:
        run: The run.
        launch: How this process was started.
        stopped: Why the run has stopped.
        how: `--requeue`.
        most: `--max_attempts`.
        begun: Whether this attempt has trained at all.
    """
    if not begun and stopped.reason == TIME_IS_UP:
        return "not a single step fits into the time that there is: another attempt would not help"
    if how == "never" or job_around(launch) is None:
        return ""
    if not checkpoints_in(run.checkpoints):
        return "not requeued: nothing is saved, so that the next attempt would begin anew"
    if run.attempt >= most:
        return f"not requeued: this was attempt {run.attempt}, and --max_attempts is {most}"
    outcome = requeue(launch, run.name)
    return f"not requeued\n{outcome.message}" if outcome.requeue is Requeue.REFUSED else outcome.message
