"""One attempt at a run: its files, the checkpoint that it resumes from, and its summary."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

from lightning.pytorch import Trainer
from typing_extensions import Self

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import checkpoints_in, step_of
from rankzero.distributed.coordination import process_group
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.monitoring.activity import END
from rankzero.distributed.monitoring.stacks import all_stacks, worker_stacks
from rankzero.distributed.process.stop_signals import SIGNALS, is_interactive
from rankzero.distributed.scheduler.job import current_job
from rankzero.distributed.scheduler.requeue import REQUEUING, requeue
from rankzero.distributed.timers import TIMERS
from rankzero.messages import (
    TIME_LIMIT_REACHED,
    CannotStart,
    LeftEarlyError,
    Stopped,
    is_peer_failure,
    is_quiet,
    mark_place,
    mark_refusal,
    print_error,
    print_line,
    print_notice,
    spelled,
    user_message,
)
from rankzero.runs.directory import RunDirectory, choose_run
from rankzero.runs.lock import RunLock
from rankzero.runs.mirror import Mirror
from rankzero.runs.rank_log import RankLog
from rankzero.runs.resume import RunOptions, choose_resume_point, run_on_rank_zero, unfinished_before
from rankzero.runs.stored_config import Config
from rankzero.runs.summary import (
    computed_metrics_of,
    describe_environment,
    reason_of,
    start_line,
    summarize,
    without_stack,
)
from rankzero.sampling.fingerprint import changes
from rankzero.sampling.plan import SamplingPlan, check_seed, order_in, resume_order

ATTEMPTS_WITHOUT_PROGRESS = 3
"""After how many attempts in a row that complete no step the job is no longer requeued."""


def objection_to_next_attempt(run: RunDirectory, stopped: Stopped, max_attempts: int, has_trained: bool) -> str:
    """Returns why another attempt would not help; an empty string if it would."""
    if not has_trained and stopped.reason == TIME_LIMIT_REACHED:
        return "the time limit is too short for a single step"
    attempts, checkpoints = run.attempts[-ATTEMPTS_WITHOUT_PROGRESS:], checkpoints_in(run.checkpoints)
    if not checkpoints:
        return "there is no checkpoint, so the next attempt would restart from the beginning"
    saved = step_of(checkpoints[-1])
    if len(attempts) == ATTEMPTS_WITHOUT_PROGRESS and {attempt.get("step") for attempt in attempts} == {saved}:
        found = f"the last {ATTEMPTS_WITHOUT_PROGRESS} attempts began at step {saved} and saved no later step"
        return f"{found}; their logs in logs/ may state why"
    if run.attempt >= max_attempts:
        return f"this was attempt {run.attempt}, and --max_attempts is {max_attempts}"
    return ""


def request_next_attempt(run: RunDirectory, launch: Launch, objection: str) -> str:
    """Requests the next attempt; returns a message for the user, if any. Only rank zero calls this, after all saves."""
    if (job := current_job(launch)) is None or job.scheduler not in REQUEUING:
        return ""
    return f"not requeued: {objection}" if objection else requeue(launch, run.name)


def agree_on_run(root: str, name: str | None, title: str, coordinator: Coordinator) -> RunDirectory:
    """Returns the run's directory, which rank zero chooses; see `choose_run`. All ranks must call."""

    def choose() -> list[str | None]:
        run = choose_run(root, name, title, coordinator.world.launch.job_id)
        return [str(run.path), run.title, run.job_title]

    path, run_title, job_title = coordinator.run_on_rank_zero(choose)
    return RunDirectory(Path(str(path)), run_title, job_title=job_title)


@dataclass
class Outcome:
    """Progress of an attempt on this rank: whether training was started, and whether it has trained on a batch.

    `error` is None without an error, or if this rank failed only because another rank did.
    """

    has_trained: bool = False
    error: Exception | None = None
    has_started: bool = False


class Display(Protocol):
    """Shows the result of an attempt: a protocol, because `runs` must not import `show`."""

    def result_text(self, summary: dict[str, Any]) -> str:
        """Returns the result for the log."""

    def show_result(self, summary: dict[str, Any]) -> None:
        """Writes the report and prints the result."""


class Attempt:
    """One attempt at a run: a context manager around Lightning's `fit`. All ranks must create one.

    Raises:
        CannotStart: The run cannot be started or resumed. Rank zero finds this, and all ranks raise it.
    """

    def __init__(
        self,
        run: RunDirectory,
        options: RunOptions,
        config: Config,
        trainer: Trainer,
        plan: SamplingPlan,
        outcome: Outcome,
        counts: Callable[[], dict[str, Any]],
        session: Session,
        display: Display,
    ) -> None:
        self.run, self.options, self.trainer, self.plan = run, options, trainer, plan
        self.outcome, self.counts, self._session, self._display = outcome, counts, session, display
        self.world = session.world
        self._coordinator, self.control_channel = session.coordinator, session.coordinator.control_channel
        self.launch = launch = session.world.launch
        self._connect()
        run.continue_in_process()
        self._lock = RunLock(launch, notify=self._print_on_rank_zero, received_signal=lambda: SIGNALS.received)
        self._mirror: Mirror | None = None
        if options.mirror and run.is_kept:
            self._coordinator.run_on_all_ranks(self._open_mirror, "opening the mirror")
        choose = partial(choose_resume_point, run, options, config, trainer, launch, self._lock)
        self.resume_plan = run_on_rank_zero(trainer.strategy, self.world.rank, choose)
        vars(run).update(vars(self.resume_plan.run))  # rank zero has broadcast them
        self.checkpoint, self.already_finished = self.resume_plan.checkpoint, self.resume_plan.already_finished
        checkpoint_io = cast(DirectoryCheckpointIO, trainer.strategy.checkpoint_io)
        checkpoint_io.trusted_sha256 = self.resume_plan.trusted_sha256
        if self.already_finished:
            checkpoint_io.verified = None
            self._finish_mirror(None)
            self._lock.release()
            check_seed(plan, order_in(self.resume_plan.manifest).get("seed"), run.name)
        self._rank_log = RankLog(run, self.world.rank)
        self._log = self._rank_log.logger
        for notice in self.resume_plan.notices:
            self._print_on_rank_zero(notice, requires_no_action=True)
        for note in self.resume_plan.notes:
            self._print_on_rank_zero(note)

    def _open_mirror(self) -> None:
        """Locks the run and downloads what this disk lacks of it, on rank zero."""
        if self.world.rank != 0:
            return
        self._lock.acquire(self.run.path)
        try:
            self._mirror = Mirror(str(self.options.mirror), self.run)
            self._mirror.restore(self.options, self.launch)
        except BaseException:
            self._lock.release()
            raise

    def _connect(self) -> None:
        """Connects all ranks, while the monitor watches: a connection of NCCL may wait for 30 minutes."""
        strategy, monitor = self.trainer.strategy, self.control_channel.monitor
        ends_run = self.options.hang_action == "stop"
        if self._session.world.backend == "nccl" and ends_run:
            process_group.disable_watchdog_of_nccl()
        in_flight = partial(process_group.collective_in_flight, self._session.world.backend, strategy.root_device)
        self._start_monitor = partial(monitor.start, self.options.hang_timeout, ends_run, in_flight)
        monitor.on_hang = lambda description: self._report_warnings(print_error)
        self._start_monitor()
        try:
            strategy.setup_environment()
        finally:
            monitor.stop()

    def train(self, fit: Callable[[], None], may_exit: bool) -> None:
        """Calls Lightning's `fit` within this attempt. All ranks must call.

        SystemExit and KeyboardInterrupt of the user's code are raised unchanged if `may_exit`.

        Raises:
            Stopped: All ranks have stopped at a safe point.
            KeyboardInterrupt: In an interactive program, the same after SIGINT.
            LeftEarlyError: The user's code raised SystemExit or KeyboardInterrupt, and `may_exit` is False.
        """
        try:
            with SIGNALS.subscribed(lambda signum: self.control_channel.request_stop(signum.name)), self:
                self._fit(fit)
        except Stopped as stopped:
            self._coordinator.barrier_before_exit()
            if is_interactive() and stopped.reason == "SIGINT":
                raise KeyboardInterrupt from None  # SystemExit would end the interpreter
            raise
        except (SystemExit, KeyboardInterrupt) as error:
            if may_exit:
                raise
            raise LeftEarlyError(f"your code ended the process: {error!r}") from error
        except Exception as error:
            if self.outcome.error in (None, error):
                raise
            raise self.outcome.error from None
        finally:
            if is_interactive():  # otherwise, the program is expected to end
                self.control_channel.forget_stop()

    def restore(self, fit: Callable[[], None]) -> None:
        """Calls Lightning's `fit`, which only restores the finished run. All ranks must call."""
        try:
            fit()
        except RuntimeError as error:
            mark_refusal(error)
            raise
        stored_data = order_in(self.resume_plan.manifest).get("data") or self.plan.data
        if differences := changes(stored_data, self.plan.data):
            found = "the training data differs from the finished run's, which this start does not train on"
            self._print_on_rank_zero("\n  ".join([f"{found}:", *differences]))

    def _fit(self, fit: Callable[[], None]) -> None:
        activity = self.control_channel.monitor.activity
        try:
            fit()
        except Exception as error:
            mark_place(error, activity.place)
            raise
        finally:
            activity.enter(END)

    def __enter__(self) -> Self:
        try:
            return self._begin()
        except BaseException:
            self._lock.release()
            raise

    def _begin(self) -> Self:
        self._started = time.perf_counter()
        begins_part, accepted = self.resume_plan.begins_part, self.options.accept_changed
        accepts_new_size = begins_part or "global_batch_size" in accepted
        self.plan.accept_changed_data = begins_part or "data" in accepted
        try:
            note = resume_order(self.plan, self.resume_plan.manifest, self.run.name, accepts_new_size)
            self._coordinator.run_on_all_ranks(self._rank_log.create)
        except CannotStart:
            if self.world.rank == 0:
                self.run.discard_attempt()
            raise
        if note:
            self._print_on_rank_zero(note)
        self._previous_callbacks = self.control_channel.on_abort, self.control_channel.describe_exit
        self._rank_log.open()
        self.control_channel.describe_exit = self._rank_log.describe_crash
        self.control_channel.on_abort = self._record_abort
        self.control_channel.monitor.on_hang = self._record_hang
        self._start_monitor()
        line = start_line(self.run, self._session, self.checkpoint)
        self._log.info("attempt %d: %s", self.run.attempt, line)
        self._print_on_rank_zero(line, requires_no_action=True)
        if self.world.rank == 0:
            if self.run.is_new and (earlier := unfinished_before(self.run)):
                print_notice(f"run {earlier} is not finished; the same command with --name {earlier} resumes it")
            self.run.write_environment(describe_environment(self._session))
        if self._mirror:
            cast(DirectoryCheckpointIO, self.trainer.strategy.checkpoint_io).call_after_saves(self._mirror.copy)
            if self.checkpoint:
                self._mirror.copy()
        self.outcome.has_started = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        summary = None
        try:
            summary = self._end(error)
        finally:
            cast(DirectoryCheckpointIO, self.trainer.strategy.checkpoint_io).wait()
            self.control_channel.monitor.stop()
            self.control_channel.on_abort, describe_exit = self._previous_callbacks
            if error is None:  # after an error, rank zero may still report how a lost rank ended
                self.control_channel.describe_exit = describe_exit
            self._lock.release()
        if summary is not None:
            # Last, because reading the curves of a long run takes a while: a scheduler may kill this process meanwhile,
            # and the next attempt may begin. It replaces the report at its own end.
            self._display.show_result(summary)
            self._finish_mirror(error)

    def _finish_mirror(self, error: BaseException | None) -> None:
        """Waits for the last copy to the mirror; briefly after a failure, which ends the processes of all ranks."""
        if self._mirror:
            self._mirror.finish(TIMERS.leave if isinstance(error, Exception) and self.world.size > 1 else TIMERS.mirror)

    def _end(self, error: BaseException | None) -> dict[str, Any] | None:
        """Writes what the next attempt needs and requests that attempt; returns the summary if there is a result."""
        self._report_warnings(self._log.warning)
        error = self.outcome.error or error
        if isinstance(error, Stopped):
            self._log.info("stopped after step %d: %s", self.trainer.global_step, error)
        elif error is not None and error is not self.outcome.error:
            cause = self.control_channel.failure_cause(TIMERS.cause) if is_peer_failure(error) else None
            self._log.error("".join(traceback.format_exception(error)) + (cause or ""))
        is_impossible = False
        if isinstance(error, Exception) and not self.outcome.has_trained:
            mark_refusal(error)
            is_impossible = user_message(error) is not None or self._coordinator.refusing_rank(error) is not None
        writes_result = self.world.rank == 0 and not self.run.is_taken_over
        try:
            summary = self._write_result(error) if writes_result and not is_impossible else None
        finally:
            self._rank_log.close()
        if writes_result and is_impossible:
            self.run.discard_attempt()
        return summary

    def _write_result(self, error: BaseException | None) -> dict[str, Any]:
        reason = reason_of(error, self.control_channel)
        if not isinstance(error, Stopped):
            return self._summarize("finished" if error is None else "failed", reason)
        objection = objection_to_next_attempt(self.run, error, self.options.max_attempts, self.outcome.has_trained)
        summary = self._summarize("stopped", reason, another_attempt=not objection)
        self._finish_mirror(error)  # first, because the scheduler ends the job
        if self.options.requeue != "never" and (line := request_next_attempt(self.run, self.launch, objection)):
            print_error(line)
        return summary

    def _print_on_rank_zero(self, text: str, requires_no_action: bool = False) -> None:
        if self.world.rank == 0 and not (requires_no_action and is_quiet()):
            print_line(f"rankzero: {spelled(text)}")

    def _record_abort(self, cause: str) -> None:
        """Writes log and summary before the control channel terminates this process; `__exit__` may not run."""
        self._report_warnings(self._log.warning)
        self._log.error(cause)
        if self.world.rank == 0:
            cast(DirectoryCheckpointIO, self.trainer.strategy.checkpoint_io).wait()
            reason, metrics = without_stack(cause), computed_metrics_of(self.trainer)
            summary = None if self.run.is_taken_over else self._summarize("failed", reason, metrics=metrics)
            self._lock.release()
            if summary:  # last, because this process may be terminated while it reads long curves
                self._display.show_result(summary)
                self._finish_mirror(RuntimeError(cause))

    def _record_hang(self, description: str) -> None:
        """Writes a hang and the stacks of this process to the log; the run may end later, or continue."""
        self._report_warnings(self._log.warning)
        workers = "".join(f"\nloader process {pid}:\n{stacks}" for pid, stacks in worker_stacks().items())
        self._log.error(f"{description}\n{all_stacks()}{workers}")

    def _report_warnings(self, report: Callable[[str], None]) -> None:
        if warnings := process_group.new_warnings_of_nccl():
            report(f"NCCL on rank {self.world.rank}:\n{warnings}")

    def _summarize(self, status: str, reason: str | None, **more: Any) -> dict[str, Any]:
        slow_ranks = list(self.control_channel.monitor.slow_ranks.values())
        facts = {"seconds": round(time.perf_counter() - self._started, 3), "slow_ranks": slow_ranks}
        facts |= self.counts() | more
        summary = summarize(status, reason, self.run, self.trainer, self.world, self.options.keep_best, **facts)
        self.run.write_summary(summary)
        # In the log too: under PBS, the signal that stops a run also ends the output of its job.
        for line in self._display.result_text(summary).splitlines():
            self._log.info(line)
        return summary
