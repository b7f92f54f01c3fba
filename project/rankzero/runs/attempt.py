"""One attempt at a run: where its files are, what it carries on from, and what is known of it at the end."""

import logging
import time
import traceback
from types import TracebackType
from typing import Any, TextIO, cast

from lightning.pytorch import Trainer
from typing_extensions import Self

from rankzero.runs import report
from rankzero.training.callbacks.failure import FailTogether
from rankzero.runs.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.runs.crash_log import CrashLog
from rankzero.equipment import equip
from rankzero.messages import CannotStart, Stopped, TakenOverError, mistake
from rankzero.training.saved_state.sample_order import take_up_order
from rankzero.runs.next_attempt import next_attempt, why_not_again
from rankzero.runs.resume import Request, agreed, decide
from rankzero.runs.lock import RunLock
from rankzero.messages import say, show
from rankzero.distributed.process.stop_signals import SIGNALS
from rankzero.training.strategies import strategy_of
from rankzero.runs.summary import summarise
from rankzero.distributed.coordinator import Team
from rankzero.distributed.devices import World


class Attempt:
    """One attempt at a run, a context manager around `trainer.fit`. All ranks must make one.

    Args:
        request: The command line.
        trainer: The Trainer; it is given a logger and the callback that saves.
        world: How many processes there are, and on what.
        team: All processes, and where this one stands.

    Raises:
        CannotStart: On every rank, where rank zero finds that the run cannot be begun or carried on.
    """

    def __init__(self, request: Request, trainer: Trainer, world: World, team: Team) -> None:
        self.request, self.trainer, self.world, self.launch = request, trainer, world, team.launch
        self.lifeline, launch = team.lifeline, team.launch
        trainer.strategy.setup_environment()
        self._lock = RunLock(launch, notice=self._tell, interrupted=lambda: SIGNALS.asked)
        self.decision = agreed(trainer.strategy, launch.rank, lambda: decide(request, trainer, launch, self._lock))
        self.run, self.checkpoint = self.decision.run, self.decision.checkpoint
        self.already_finished = self.decision.already_finished
        if self.already_finished:
            self._lock.release()
        cast(DirectoryCheckpointIO, trainer.strategy.checkpoint_io).trusted_sha256 = self.decision.trusted_sha256
        self._failing = FailTogether(team.lifeline)
        trainer.callbacks.insert(0, self._failing)  # type: ignore[attr-defined]
        self._log = logging.getLogger("rankzero")
        self._crash_log = CrashLog(self.run)
        for note in self.decision.notes:
            self._tell(note)

    @property
    def first_error(self) -> Exception | None:
        """What this rank has failed of, whatever came of it on the way out; None where it has not."""
        return self._failing.error

    @property
    def begun(self) -> bool:
        """Whether a batch has been trained on."""
        return self._failing.begun

    def __enter__(self) -> Self:
        try:
            return self._begin()
        except BaseException:
            self._lock.release()
            raise

    def _begin(self) -> Self:
        self._started = time.perf_counter()
        accepts = "global_batch_size" in (self.request.config.accept_changed or "")
        try:
            note = take_up_order(strategy_of(self.trainer).sharding, self.decision.manifest, self.run.name, accepts)
        except CannotStart:
            if self.launch.rank == 0:
                self.run.discard_attempt()
            raise
        if note:
            self._tell(note)
        self._open_log()
        self.lifeline.last_words = self._last_words
        equip(self.trainer, self.request, self.decision, self.launch, self.lifeline)
        line = report.start_line(self.run, self.world, self.launch, self.checkpoint)
        self._log.info("attempt %d: %s", self.run.attempt, line)
        self._tell(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        finally:
            cast(DirectoryCheckpointIO, self.trainer.strategy.checkpoint_io).wait()
            self._lock.release()

    def _end(self, error: BaseException | None) -> None:
        error = self.first_error or error
        if isinstance(error, Stopped):
            self._log.info("stopped behind step %d: %s", self.trainer.global_step, error)
        elif error is not None and error is not self.first_error:
            self._log.error("".join(traceback.format_exception(error)))
        impossible = not self.begun and isinstance(error, Exception) and mistake(error) is not None
        self._crash_log.disable()
        for handler in list(self._log.handlers):
            handler.close()
            self._log.removeHandler(handler)
        if self.launch.rank != 0 or self._is_taken_over():
            return
        if impossible:
            self.run.discard_attempt()
            return
        if not isinstance(error, Stopped):
            status = "finished" if error is None else "failed"
            report.print_table(self._summarise(status), self.run, self.world, self._log_folders())
            return
        against = why_not_again(self.run, error, self.request.config.max_attempts, self.begun)
        summary = self._summarise("stopped", again=not against)
        report.print_table(summary, self.run, self.world, self._log_folders())
        if self.request.config.requeue != "never" and (line := next_attempt(self.run, self.launch, against)):
            say(line)

    def _log_folders(self) -> list[str]:
        return [str(logger.log_dir) for logger in self.trainer.loggers if getattr(logger, "log_dir", None)]

    def _is_taken_over(self) -> bool:
        try:
            self.run.check_still_ours()
        except TakenOverError:
            return True
        return False

    def _tell(self, text: str) -> None:
        if self.launch.rank == 0:
            show(f"rankzero: {text}")

    def _open_log(self) -> None:
        handler = logging.FileHandler(self.run.log(self.launch.rank or 0))
        handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk: it is told elsewhere
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._log.addHandler(handler)
        self._crash_log.enable(cast(TextIO, handler.stream))
        self.lifeline.how_ended = self._crash_log.how_ended
        self._log.setLevel(logging.INFO)
        self._log.propagate = False

    def _last_words(self, cause: str) -> None:
        """For a process that is ended because another one has failed; it may not come to its end."""
        self._log.error(cause)
        if self.launch.rank == 0:
            cast(DirectoryCheckpointIO, self.trainer.strategy.checkpoint_io).wait()
            if not self._is_taken_over():
                self._summarise("failed")
            self._lock.release()

    def _summarise(self, status: str, again: bool = False) -> dict[str, Any]:
        seconds, best = time.perf_counter() - self._started, self.request.config.keep_best
        summary = summarise(status, self.trainer, self.run, self.world, self.launch, best, seconds, again)
        try:
            self.run.write_summary(summary)
        except OSError as error:
            say(f"summary.json could not be written: {error}")
        return summary
