import contextlib
import io
import json
import socket
import threading
import time
from pathlib import Path

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from rankzero import Trainer
from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.session import Session
from rankzero.messages import AnotherRankFailed, RequestError
from rankzero.preflight import all_checks
from rankzero.preflight.all_checks import NetworkOptions, PlannedRun, check_all, check_before_fit, thresholds
from rankzero.preflight.check import FAIL, OK, SKIPPED, WARN, Check
from rankzero.preflight.report import Report
from rankzero.sampling.generators import draw
from rankzero.sampling.plan import SamplingPlan


def test_the_thresholds_of_all_checks_are_numbers_or_modes():
    values = thresholds(NetworkOptions(warn_gbps=10.0))
    assert values["warn_gbps"] == 10.0 and values["pairs"] == "quick" and values["clock_seconds"] == 1.0
    assert json.loads(json.dumps(values)) == values


def trainer(**settings):
    return Trainer(
        accelerator="cpu", max_steps=2, enable_progress_bar=False, enable_model_summary=False, logger=False, **settings
    )


class Recorded(BoringModel):
    """Records the calls of its hooks and random numbers."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def on_train_start(self):
        self.calls.append(draw())


def fit(mode):
    model = Recorded()
    trainer(preflight=mode, seed=1, name=mode).fit(model)
    return model.calls


def test_a_full_preflight_on_one_process_trains_a_copy(script_folder, capsys):
    assert fit("full") == fit("off")
    printed = capsys.readouterr().out
    assert "verdict: fit to train" in printed and "skipped  links            there is only one process" in printed


def test_a_failed_preflight_refuses_the_run(script_folder, monkeypatch):
    monkeypatch.setattr(
        all_checks, "check_steps", lambda *_: Check("training steps", FAIL, "a step of the model fails")
    )
    model = Recorded()
    with pytest.raises(RequestError, match='preflight="full"'):
        trainer(preflight="full").fit(model)
    assert model.calls == [] and not (script_folder / "runs").exists()


def test_an_unknown_mode_is_refused(script_folder):
    with pytest.raises(RequestError, match='preflight="fast"'):
        trainer(preflight="fast")


def compare(coordinator, name, status):
    """Returns the refusal and the output of a comparison in which one check has this status."""
    session = Session(RequestedWorld(), coordinator, WorldInfo("cpu", size=2), "")
    check = Check(name, status, "torch differs between ranks", ["torch: 1; 2"], ["install the same"])
    fine = Check("other", OK, "fine")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setattr(all_checks, "check_environment", lambda *_: check if name == "environment" else fine)
        patch.setattr(all_checks, "check_launcher", lambda *_: check if name == "launcher" else fine)
        run = PlannedRun(BoringModel(), None, SamplingPlan(), {}, Path("runs"), 3, {})
        try:
            check_before_fit("quick", session, run)
        except RequestError as error:
            return [error.asked, error.found, error.instead], printed.getvalue()
        return None, printed.getvalue()


@pytest.mark.parametrize("name", ["environment", "launcher"])
def test_a_failed_comparison_refuses_the_run_on_all_ranks(on_ranks, name):
    found, advice = "torch: 1; 2", "install the same"
    if name == "environment":
        found = f"torch differs between ranks\n{found}"
        advice += "\nor, if the difference is intended, --preflight off"
    assert on_ranks(compare, 2, name, FAIL) == [(["training on 2 ranks", found, advice], "")] * 2


def test_a_warning_and_its_advice_are_printed_once_and_the_run_begins(on_ranks):
    first, second = on_ranks(compare, 2, "environment", WARN)
    assert first == (
        None,
        "rankzero: warning: torch differs between ranks\n  torch: 1; 2\n  install the same\n",
    )
    assert second == (None, "")


def test_equal_ranks_print_nothing(on_ranks):
    assert on_ranks(compare, 2, "environment", OK) == [(None, "")] * 2


def test_a_model_that_cannot_be_copied_is_not_tried_and_trains(script_folder, capsys):
    class Locked(Recorded):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    model = Locked()
    trainer(preflight="full").fit(model)
    printed = capsys.readouterr().out
    assert "skipped  data             the model and the data cannot be copied" in printed
    assert model.calls and "verdict: fit to train" in printed


def test_a_data_module_of_an_earlier_trainer_is_copied(script_folder, capsys):
    data = BoringDataModule()
    for name in ("first", "second"):
        trainer(preflight="full", name=name).fit(Recorded(), datamodule=data)
    assert capsys.readouterr().out.count("64 samples, the same on all ranks") == 2


def check_with_a_missing_rank(coordinator):
    if coordinator.launch.rank == 1:
        time.sleep(2)
        return None
    session = Session(RequestedWorld(), coordinator, WorldInfo("cpu", size=2), "")
    report = Report(prints=False)
    coordinator.timeout = 0.5
    try:
        run = PlannedRun(BoringModel(), None, SamplingPlan(), {}, Path("runs"), 3, {})
        check_all(session, run, NetworkOptions(), report)
    except AnotherRankFailed:
        return report.checks["launcher"].summary


def test_a_rank_that_stops_responding_fails_the_check_in_progress(on_ranks):
    host = socket.gethostname()
    assert on_ranks(check_with_a_missing_rank, 2)[0] == f"rank 1 on {host} did not respond within 0.5 s"


def check_with_own_options(coordinator):
    session = Session(RequestedWorld(), coordinator, WorldInfo("cpu", size=2), "")
    run = PlannedRun(
        BoringModel(), None, SamplingPlan(rank=coordinator.launch.rank, world_size=2), {}, Path("runs"), 3, {}
    )
    report = Report(prints=False)
    code = check_all(session, run, NetworkOptions(pairs=("off", "all")[coordinator.launch.rank]), report)
    return code, {check.name: check.status for check in report.checks.values()}


def test_the_options_of_rank_zero_apply_to_all_ranks(on_ranks, cwd):
    first, second = on_ranks(check_with_own_options, 2)
    assert first == second and first[0] == 0 and first[1]["links"] == SKIPPED
    assert first[1]["training steps"] == SKIPPED  # the fixture's process group exists
