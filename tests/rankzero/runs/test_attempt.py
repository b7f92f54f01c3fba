"""Files, locks and messages of an attempt, for every way in which an attempt can end."""

import errno
import io
import json
import logging
import os
import pickle
import re
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from rankzero.checkpoints.checkpoint_io import DirectoryCheckpointIO
from rankzero.checkpoints.manifest import verify
from rankzero.checkpoints.write import write_directory
from rankzero.distributed.coordination import process_group
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch import Launch, RequestedWorld
from rankzero.distributed.monitoring.activity import START
from rankzero.distributed.monitoring.monitor import Monitor
from rankzero.distributed.world import World
from rankzero.messages import CannotStart, LeftEarlyError, RequestError, Stopped
from rankzero.runs import attempt as attempt_module
from rankzero.runs.attempt import Attempt, Outcome, agree_on_run
from rankzero.runs.directory import RunDirectory
from rankzero.runs.resume import RunOptions
from rankzero.sampling.plan import SamplingPlan
from rankzero.show.report import page as report_module
from rankzero.show.terminal import ResultDisplay
from rankzero.training.fit_loop import install
from rankzero.training.strategies import OneProcess
from recorded_runs import locked
from running import TOY, fit_in_process
from stock import SILENT

CONFIG = {"model": {"class_path": "Net"}}


class Ranks(OneProcess):
    """Strategy that passes the broadcasts of rank zero's attempt to a later attempt on another rank."""

    sent = b""

    def broadcast(self, obj, src=0):
        if obj is not None:
            Ranks.sent = pickle.dumps(obj)
        return pickle.loads(Ranks.sent)


@pytest.fixture
def attempt(cwd):
    """Returns a function that begins attempts at the run `runs/x` in this process."""

    def make(plan=None, has_trained=True, rank=0, backend="gloo", **options):
        plan = plan or SamplingPlan()
        trainer = Trainer(strategy=Ranks(plan, device="cpu"), plugins=[DirectoryCheckpointIO()], max_epochs=2, **SILENT)
        install(trainer, plan)
        coordinator = Coordinator(World(Launch(rank=rank), backend=backend), RequestedWorld())
        counts = {"problem": None, "samples": 0, "samples_per_second": 0.0, "ledger": []}
        run, options = RunDirectory(Path("runs/x")), RunOptions(**options)
        outcome, session = Outcome(has_trained), Session(RequestedWorld(), coordinator, "")
        display = ResultDisplay(trainer, run, session.world)
        return Attempt(run, options, CONFIG, trainer, plan, outcome, lambda: counts, session, display)

    return make


def save(step=5, **order):
    order = {"seed": 0, "global_batch_sizes": [8], "data": {}, "positions": [{"epoch": 0, "step": step}], **order}
    record = {"run": "x", "config": CONFIG, "order": order}
    write_directory({"epoch": 0, "global_step": step, "rankzero": record}, Path(f"runs/x/checkpoints/step-{step:08d}"))


def read(name):
    return json.loads((Path("runs/x") / name).read_text())


def log():
    return Path("runs/x/logs/rank-000.log").read_text()


def is_free():
    """Locks and unlocks the run, which fails if the run is locked; returns whether no lock file is left."""
    with locked(Path("runs/x")):
        pass
    return not list(Path("runs").glob(".x.lock*"))


def stop(run_attempt, work=lambda: None):
    with pytest.raises(Stopped), run_attempt:
        work()
        raise Stopped("SIGTERM")


def test_a_finished_attempt_leaves_summary_log_and_no_lock_and_the_next_attempt_appends_to_the_log(attempt, capsys):
    with attempt() as run_attempt:
        assert Path("runs/.x.lock").exists() and run_attempt.checkpoint is None
        logging.getLogger("rankzero").info("message 1")
        with pytest.raises(RequestError, match="has been training run x since"):
            attempt()
    summary = read("summary.json")
    assert summary["status"] == "finished" and len(read("run.json")["attempts"]) == 1
    assert {"problem", "samples", "samples_per_second", "ledger", "seconds", "slow_ranks"} < summary.keys()
    assert "INFO attempt 1: local (" in log() and "INFO message 1" in log() and "Traceback" not in log()
    origin = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} rank 0 on {re.escape(socket.gethostname())} INFO "
    assert all(re.match(origin, line) for line in log().splitlines())
    out = capsys.readouterr().out
    assert out.startswith("rankzero: local (") and "run x: finished" in out
    assert "INFO run x: finished\n" in log() and "INFO │ checkpoint " in log()
    assert is_free() and [type(handler) for handler in logging.getLogger("rankzero").handlers] == [logging.NullHandler]
    stop(attempt(), lambda: logging.getLogger("rankzero").info("message 2"))
    assert [log().count(text) for text in ("attempt 1: ", "message 1", "attempt 2: ", "message 2")] == [1, 1, 1, 1]
    assert read("summary.json")["attempts"] == 2


def test_a_stopped_attempt_is_in_its_mirror_before_the_job_is_requeued(attempt, monkeypatch):
    found, mirror = [], Path("mirror/x")
    monkeypatch.setattr(attempt_module, "request_next_attempt", lambda *_: found.extend(mirror.rglob("*.json")))
    stop(attempt(mirror="mirror"), lambda: save(5))
    assert {mirror / "summary.json", mirror / "checkpoints/step-00000005/manifest.json"} <= {*found}


@pytest.mark.parametrize(("level", "propagate"), [(logging.NOTSET, True), (logging.ERROR, False)])
def test_an_attempt_restores_the_users_logging_settings_at_its_end(attempt, monkeypatch, level, propagate):
    logger, texts = logging.getLogger("rankzero"), io.StringIO()
    user_handler = logging.StreamHandler(texts)
    for name, value in (("handlers", [user_handler]), ("propagate", propagate), ("level", level)):
        monkeypatch.setattr(logger, name, value)
    with attempt():
        logger.info("in between")
    assert (logger.handlers, logger.propagate, logger.level) == ([user_handler], propagate, level)
    logger.error("after the attempt")
    assert "in between" in texts.getvalue() and "after the attempt" in texts.getvalue()
    assert "in between" in log() and "after the attempt" not in log()


@pytest.mark.parametrize(("reported", "has_trained"), [(False, True), (True, True), (False, False)])
def test_a_failure_is_logged_once_and_keeps_the_attempt(attempt, reported, has_trained):
    """`ReportFailure` has already logged the error stored in the outcome."""
    with pytest.raises(RuntimeError, match="no such layer"), attempt(has_trained=has_trained) as run_attempt:
        error = RuntimeError("no such layer")
        run_attempt.outcome.error = error if reported else None
        raise error
    assert log().count("RuntimeError: no such layer") == (0 if reported else 1)
    assert read("summary.json")["status"] == "failed" and is_free()
    assert read("summary.json")["reason"].startswith("Traceback") and "no such layer" in read("summary.json")["reason"]


@pytest.mark.parametrize(
    ("settings", "saved", "another_attempt"), [({}, True, True), ({}, False, False), ({"max_attempts": 1}, True, False)]
)
def test_the_summary_of_a_stopped_attempt_states_if_another_attempt_follows(
    attempt, settings, saved, another_attempt, capsys
):
    stop(attempt(**settings), lambda: saved and save())
    summary = read("summary.json")
    assert (summary["status"], summary["another_attempt"]) == ("stopped", another_attempt)
    assert "0: SIGTERM" in log() and "Traceback" not in log()
    assert "run x: stopped" in capsys.readouterr().out and is_free()


@pytest.mark.parametrize("has_trained", [False, True])
@pytest.mark.parametrize("kind", [CannotStart, MisconfigurationException])
def test_an_explained_error_undoes_the_attempt_only_before_the_first_batch(attempt, kind, has_trained, capsys):
    with pytest.raises(kind), attempt(has_trained=has_trained):
        raise kind("no such strategy")
    assert Path("runs").exists() == has_trained and ("run x: failed" in capsys.readouterr().out) == has_trained
    assert not has_trained or read("summary.json")["status"] == "failed"
    with attempt():
        pass
    before = (read("run.json"), read("summary.json"))
    with pytest.raises(kind), attempt(has_trained=False, resume="never"):
        raise kind("no such data")
    assert (read("run.json"), read("summary.json")) == before
    assert [path.name for path in Path("runs").iterdir()] == ["x"]


def test_a_superseded_attempt_keeps_the_newer_files_and_a_summary_that_cannot_be_written_is_reported(attempt, capsys):
    with attempt():
        RunDirectory(Path("runs/x")).begin_attempt("model: {class_path: Net}\n")
    assert not Path("runs/x/summary.json").exists() and len(read("run.json")["attempts"]) == 2
    assert "run x: " not in capsys.readouterr().out
    with attempt():
        Path("runs/x/summary.json").mkdir()
    printed = capsys.readouterr()
    assert printed.err.startswith("rankzero: summary.json could not be written: ") and "run x: finished" in printed.out
    assert is_free()


@pytest.mark.parametrize("may_exit", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_of_the_users_code_is_an_error_unless_allowed_and_the_first_error_is_raised(attempt, kind, may_exit):
    with pytest.raises(kind if may_exit else LeftEarlyError):
        attempt().train(Mock(side_effect=kind), may_exit)
    assert read("summary.json")["status"] == "failed" and is_free()
    run_attempt = attempt()
    run_attempt.outcome.error = LookupError("the first")
    with pytest.raises(LookupError, match="the first"):
        run_attempt.train(Mock(side_effect=RuntimeError("the second")), may_exit=False)


def save_slowly(run_attempt):
    """Starts a background save that ends once something waits for it."""
    io, may_end = run_attempt.trainer.strategy.checkpoint_io, threading.Event()
    io.on_committed = lambda path: may_end.wait() and path.rename(path.with_name("step-00000007"))
    io.save_checkpoint({"w": torch.ones(2)}, Path("runs/x/checkpoints/step-00000006"))
    io.wait = lambda *arguments, wait=io.wait: may_end.set() or wait(*arguments)


def test_an_attempt_aborted_by_another_rank_is_logged_saved_reported_and_unlocked(attempt, capsys):
    """The control channel calls `on_abort` in a separate thread before it terminates the process."""
    save(5)
    cause = "rank 1 on a failed: <IndexError>"
    with attempt() as run_attempt:
        save_slowly(run_attempt)
        thread = threading.Thread(target=run_attempt.control_channel.on_abort, args=(cause,))
        thread.start()
        thread.join()
        verify(Path("runs/x/checkpoints/step-00000007"))
        assert f"ERROR {cause}" in log() and read("summary.json")["status"] == "failed" and is_free()
        assert "rank 1 on a failed: &lt;IndexError&gt;</pre>" in Path("runs/x/report.html").read_text()
        printed = capsys.readouterr().out
        assert "run x: failed" in printed and "to resume" in printed


def test_the_monitor_runs_while_the_ranks_connect_and_nccls_warnings_are_printed_or_logged(
    attempt, monkeypatch, capsys
):
    warnings, found, monitors = ["NCCL WARN no route to n2", "NCCL WARN n3 is slow"], [], []
    monkeypatch.setattr(process_group, "new_warnings_of_nccl", lambda: warnings.pop(0) if warnings else "")

    def start_and_keep(monitor, *arguments, start=Monitor.start):
        monitors.append(monitor)
        start(monitor, *arguments)

    def connect(strategy):
        monitors[0].activity.since -= 10
        monitors[0].on_hang("all ranks have been waiting")
        found.append(monitors[0].status().phase)

    monkeypatch.setattr(Monitor, "start", start_and_keep)
    monkeypatch.setattr(Ranks, "setup_environment", connect)
    run_attempt = attempt()
    assert monitors[0].status() is None
    with run_attempt:
        pass
    assert found == [START] and "NCCL on rank 0:\nNCCL WARN no route to n2" in capsys.readouterr().err
    assert "WARNING NCCL on rank 0:\nNCCL WARN n3 is slow" in log()


@pytest.mark.parametrize(
    ("backend", "action", "count"), [("nccl", "stop", 1), ("nccl", "report", 0), ("gloo", "stop", 0)]
)
def test_torchs_watchdog_is_disabled_only_if_the_monitor_ends_a_run_over_nccl(
    attempt, monkeypatch, backend, action, count
):
    disable = Mock()
    monkeypatch.setattr(process_group, "disable_watchdog_of_nccl", disable)
    attempt(backend=backend, hang_action=action)
    assert disable.call_count == count


def test_the_report_is_written_after_all_that_the_next_attempt_needs(attempt, monkeypatch, capsys):
    """A scheduler may kill the process while it reads long curves."""
    monkeypatch.setattr(attempt_module, "request_next_attempt", lambda *_: "job 7 is requeued")
    reported = []

    def write_report(run, summary):
        assert "job 7 is requeued" in capsys.readouterr().err and is_free()
        verify(Path("runs/x/checkpoints/step-00000007"))
        reported.append(read("summary.json") == summary)

    monkeypatch.setattr(report_module, "write_report", write_report)
    save(5)
    run_attempt = attempt()
    stop(run_attempt, lambda: save_slowly(run_attempt))
    assert reported == [True] and "run x: stopped" in capsys.readouterr().out


def test_the_next_attempt_may_begin_while_the_report_is_written(attempt, monkeypatch, capsys):
    render, began = report_module.render, []

    def render_slowly(run, summary):
        if not began:
            began.append(run.attempt)
            with attempt():  # its end renders the report again
                pass
            assert "attempt" in Path("runs/x/report.html").read_text()
            Path("runs/x/report.html").write_text("of attempt 2")
        return render(run, summary)

    monkeypatch.setattr(report_module, "render", render_slowly)
    save(5)
    stop(attempt())
    assert began == [1] and read("summary.json")["attempts"] == 2 and "could not be" not in capsys.readouterr().err
    assert Path("runs/x/report.html").read_text() == "of attempt 2"


@pytest.mark.parametrize(
    ("error", "report_error", "text"),
    [
        *((error, MemoryError(), "MemoryError()") for error in (None, RuntimeError("no such layer"))),
        (Stopped("SIGTERM"), OSError(errno.ENOSPC, "no space"), "[Errno 28] no space"),
    ],
)
def test_an_end_waits_for_a_background_save_and_no_failure_of_the_report_or_later_changes_result_or_summary(
    attempt, monkeypatch, error, report_error, text, capsys
):
    monkeypatch.setattr(report_module, "render", Mock(side_effect=report_error))
    save(5)
    run_attempt = attempt()
    describe_exit = run_attempt.control_channel.describe_exit
    with pytest.raises(type(error)) if error else nullcontext(), run_attempt:
        save_slowly(run_attempt)
        if error:
            raise error
    verify(Path("runs/x/checkpoints/step-00000007"))
    before, printed = read("summary.json"), capsys.readouterr()
    assert f"run x: {before['status']}" in printed.out and is_free()
    assert printed.err.count(f"report.html could not be written: {text}\n") == printed.err.count("\n") == 1
    run_attempt.control_channel.on_abort("os._exit was called")
    assert read("summary.json") == before and "os._exit" not in log()
    assert (run_attempt.control_channel.describe_exit is describe_exit) == (error is None)


def test_other_ranks_follow_rank_zero_and_write_only_their_log(attempt, capsys):
    def changes():
        return {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*.*") if path != rank_log}

    rank_log, plan = Path("runs/x/logs/rank-001.log"), SamplingPlan(rank=1)
    save(5)
    stop(attempt())
    before, _ = changes(), capsys.readouterr()
    with attempt(plan, rank=1) as run_attempt:
        assert (run_attempt.run.attempt, run_attempt.run.id) == (1, read("run.json")["id"])
        assert not Path("runs/.x.lock").exists()
        assert run_attempt.checkpoint.name == "step-00000005" and plan.start_positions[0].step == 5
    assert "attempt 1: local" in rank_log.read_text() and capsys.readouterr().out == "" and changes() == before


def agree(coordinator, folder):
    os.chdir(folder)
    root = "runs" if coordinator.world.rank == 0 else "elsewhere"
    runs = [agree_on_run(root, name, "MLP-Toy", coordinator) for name in (None, "x")]
    return [(str(run.path), run.title) for run in runs]


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_agree_on_the_directory_that_rank_zero_chooses(cwd, on_ranks, world):
    (cwd / "runs/MLP-Toy-1").mkdir(parents=True)
    assert on_ranks(agree, world, cwd) == [[("runs/MLP-Toy-2", "MLP-Toy"), ("runs/x", None)]] * world
    assert [path.name for path in (cwd / "runs").iterdir()] == ["MLP-Toy-1"]


def test_the_summary_is_written_even_if_the_disk_of_the_log_is_full(finished):
    run = finished()
    log = run / "logs/rank-000.log"
    log.unlink()
    log.symlink_to("/dev/full")
    assert fit_in_process(*TOY, "--name", "x", "--epochs", "2") == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["epochs"]) == ("finished", 2)
