import json

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.preflight import checks
from rankzero.preflight.check import FAIL, WARN, Check
from rankzero.preflight.checks import Options, thresholds
from rankzero.sampling.generators import draw


def test_the_thresholds_of_all_checks_are_numbers_or_modes():
    values = thresholds(Options(warn_gbps=10.0))
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
    monkeypatch.setattr(checks, "check_step", lambda *_: Check("one step", FAIL, "a step of the model fails"))
    model = Recorded()
    with pytest.raises(RequestError, match='preflight="full"'):
        trainer(preflight="full").fit(model)
    assert model.calls == [] and not (script_folder / "runs").exists()


def test_an_unknown_mode_is_refused(script_folder):
    with pytest.raises(RequestError, match='preflight="fast"'):
        trainer(preflight="fast")


def compare(coordinator, status):
    from rankzero.distributed.devices import WorldInfo

    with pytest.MonkeyPatch.context() as patch:
        check = Check("environment", status, "torch differs between ranks", ["torch: 1; 2"], ["install the same"])
        patch.setattr(checks, "check_environment", lambda *_: check)
        try:
            checks._compare_ranks(coordinator, WorldInfo("cpu", size=2), {})
        except RequestError as error:
            return error.found, error.instead
        return None


@pytest.mark.parametrize("status", [WARN, FAIL])
def test_only_a_failed_comparison_refuses_a_run(on_ranks, status):
    found = "torch differs between ranks\ntorch: 1; 2"
    advice = "install the same\nor, if the difference is intended, --preflight off"
    assert on_ranks(compare, 2, status) == [(found, advice) if status == FAIL else None] * 2
