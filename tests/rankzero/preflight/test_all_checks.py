import contextlib
import io
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from rankzero import Trainer
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.messages import AnotherRankFailed, RequestError
from rankzero.preflight import all_checks, training
from rankzero.preflight.all_checks import NetworkOptions, PlannedRun, check_all, check_before_fit
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN, Check, Report
from rankzero.sampling.generators import draw
from rankzero.sampling.plan import SamplingPlan
from running import world_of
from stock import QUIET


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(training, "SECONDS", 0.1)


def trainer(**settings):
    return Trainer(max_steps=2, logger=False, **QUIET, **settings)


class Recorded(BoringModel):
    """Records the calls of its hooks and random numbers."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def on_train_start(self):
        self.calls.append(draw())


def test_a_full_preflight_on_one_process_trains_a_copy(script_folder, capsys):
    models = {mode: Recorded() for mode in ("full", "off")}
    for mode, model in models.items():
        trainer(preflight=mode, seed=1, name=mode).fit(model)
    assert models["full"].calls == models["off"].calls
    printed = capsys.readouterr().out
    assert "skipped  GPUs             the run uses cpu" in printed
    assert "verdict: fit to train" in printed and "skipped  links            there is only one process" in printed
    with pytest.raises(RequestError, match='preflight="fast"'):
        trainer(preflight="fast")


def test_a_failed_preflight_refuses_the_run(script_folder, monkeypatch):
    failed = Check("training steps", FAIL, "a step of the model fails")
    monkeypatch.setattr(all_checks, "check_steps", lambda *_: failed)
    model = Recorded()
    with pytest.raises(RequestError, match='preflight="full"'):
        trainer(preflight="full").fit(model)
    assert model.calls == [] and not (script_folder / "runs").exists()


def session_of(coordinator):
    return Session(RequestedWorld(), coordinator, "")


def planned_run(plan=None):
    return PlannedRun(BoringModel(), None, plan or SamplingPlan(), {}, Path("runs"), 3, {})


CASES = [("environment", OK), ("environment", WARN), ("environment", FAIL), ("launcher", FAIL)]


def compare(coordinator):
    """Returns the refusal and the output of a comparison for each case: a check and its status."""
    session, fine, results = session_of(coordinator), Check("other", OK, "fine"), []
    for name, status in CASES:
        check = Check(name, status, "torch differs between ranks", ["torch: 1; 2"], ["install the same"])
        printed, refusal = io.StringIO(), None
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
            for other in ("environment", "launcher"):
                patch.setattr(all_checks, f"check_{other}", lambda *_, found=check if name == other else fine: found)
            try:
                check_before_fit("quick", session, planned_run())
            except RequestError as error:
                refusal = [error.asked, error.found, error.instead]
        results.append((refusal, printed.getvalue()))
    return results


def test_a_failed_comparison_refuses_the_run_on_all_ranks_and_a_warning_is_printed_once(on_ranks):
    found, advice = "torch: 1; 2", "install the same"
    extended = f"torch differs between ranks\n{found}", f"{advice}\nor, if the difference is intended, --preflight off"
    refusals = [["training on 2 ranks", *extended], ["training on 2 ranks", found, advice]]
    warning = "rankzero: warning: torch differs between ranks\n  torch: 1; 2\n  install the same\n"
    for rank, (equal, warned, *failed) in enumerate(on_ranks(compare, 2)):
        assert equal == (None, "") and warned == (None, "" if rank else warning)
        assert failed == [(refusal, "") for refusal in refusals]


def test_a_model_that_cannot_be_copied_is_not_tried_and_a_data_module_of_an_earlier_trainer_is(script_folder, capsys):
    class Locked(Recorded):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model, data = Locked(), BoringDataModule()
    trainer(preflight="full").fit(model)
    printed = capsys.readouterr().out
    assert "skipped  data             the model and the data cannot be copied" in printed
    assert model.calls and "verdict: fit to train" in printed
    for name in ("first", "second"):
        trainer(preflight="full", name=name).fit(Recorded(), datamodule=data)
    assert capsys.readouterr().out.count("64 samples, the same on all ranks") == 2


def check_with_a_missing_rank(coordinator, ended):
    if coordinator.world.rank == 1:
        while not ended.exists():
            time.sleep(0.01)
        return None
    report = Report(prints=False)
    coordinator.timeout = 0.5
    try:
        check_all(session_of(coordinator), planned_run(), NetworkOptions(), report)
    except AnotherRankFailed:
        return report.checks["launcher"].summary
    finally:
        ended.touch()


def test_a_rank_that_stops_responding_fails_the_check_in_progress(on_ranks, tmp_path):
    found, _ = on_ranks(check_with_a_missing_rank, 2, tmp_path / "ended")
    late = "was still starting after 0.5 s; to wait longer, add --start_timeout 4"
    assert found == f"rank 1 on {socket.gethostname()} {late}"


class UnconnectedCoordinator:
    """Replacement for the coordinator of two ranks whose NCCL cannot connect."""

    def __init__(self):
        self.settings, self.world = [], world_of("cuda", size=2, backend="nccl")

    def init_process_group(self, backend, device, timeout):
        self.settings.append((backend, device, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))
        raise dist.DistBackendError("NCCL error in: x.cpp:93, unhandled system error")

    def decide(self, value, choose, seconds):
        return [value, value]


def test_an_error_of_nccl_while_it_connects_fails_a_check(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    coordinator, report = UnconnectedCoordinator(), Report(prints=False)
    assert not all_checks._check_network(session_of(coordinator), planned_run(), NetworkOptions(), report, None)
    check = report.checks["nccl messages"]
    assert check.status == FAIL and "unhandled system error" in check.details[0]
    assert coordinator.settings == [("nccl", torch.device("cuda", 0), "1")]


def test_after_an_error_of_nccl_whose_group_remains_no_step_is_tried(monkeypatch):
    coordinator = SimpleNamespace(broadcast_object=lambda value: value, world=world_of(size=2))
    tried = []
    for name in ("launcher", "processes", "environment", "run_directory", "imports"):
        monkeypatch.setattr(all_checks, f"check_{name}", lambda *_: Check("imports", OK, ""))
    monkeypatch.setattr(all_checks, "_check_network", lambda *_: False)
    monkeypatch.setattr(all_checks, "destroy_process_group", lambda after_error: False)
    monkeypatch.setattr(all_checks, "_check_training", lambda session, run, *_: tried.append(run.untried))
    check_all(session_of(coordinator), planned_run(), NetworkOptions(), Report(prints=False, thresholds={}))
    assert tried == ["the ranks cannot communicate"]


def check_with_own_options(coordinator):
    rank, report = coordinator.world.rank, Report(prints=False)
    run = planned_run(SamplingPlan(rank=rank, world_size=2))
    code = check_all(session_of(coordinator), run, NetworkOptions(pairs=("off", "all")[rank]), report)
    return code, {check.name: check.status for check in report.checks.values()}


def test_the_options_of_rank_zero_apply_to_all_ranks(on_ranks, cwd):
    first, second = on_ranks(check_with_own_options, 2)
    assert first == second and first[0] == 0 and first[1]["links"] == SKIPPED
    assert first[1]["training steps"] == SKIPPED  # the fixture's process group exists
