import json
import math
import traceback
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import MeanMetric

from rankzero.checkpoints.manifest import MANIFEST
from rankzero.checkpoints.write import write_directory
from rankzero.messages import AnotherRankFailed, RunError, Stopped, mark_place
from rankzero.runs.directory import RunDirectory
from rankzero.runs.summary import computed_metrics_of, metrics_of, reason_of, summarize, without_stack
from running import train_in_process, world_of

LOGGED = {"val/b": 1.5, "a": math.nan, "c": math.inf, "d": -math.inf, "count": 3}
FACTS = {"samples": 1234, "seconds": 12.346, "ledger": ["epoch 1: 6 of 6 samples, each once"]}
SHOWN = {"a": None, "c": None, "count": 3.0, "d": None, "val/b": 1.5}


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log_dict(LOGGED)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        """Logs nothing."""


@pytest.fixture(scope="module")
def trainer():
    model = Logs()
    train_in_process(model=model, max_epochs=2, limit_train_batches=3)
    return model.trainer


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "x", attempt=4)


def summary_of(trainer, run, world=None, keep_best=None, status="finished", **settings):
    world = world or world_of("cpu")
    world.launch = world.launch._replace(launcher="slurm")
    return summarize(status, "at token=abc", run, trainer, world, keep_best, **FACTS, **settings)


def test_the_summary_of_a_run_has_all_fields_and_survives_strict_json(trainer, run):
    summary = summary_of(trainer, run)
    assert summary == (
        {"run": "x", "status": "finished", "reason": "at token=...", "epochs": 2, "steps": 6, **FACTS}
        | {"world_size": 1, "nodes": 1, "devices": 1, "launcher": "slurm", "accelerator": "cpu", "backend": None}
        | {"metrics": SHOWN, "attempts": 4, "part": 1, "another_attempt": False, "checkpoint": None, "best": None}
        | {"can_validate": True, "max_epochs": 2, "max_steps": -1}
    )
    assert list(summary["metrics"]) == sorted(SHOWN) and summary["metrics"] == metrics_of(trainer)
    assert all(value is None or type(value) is float for value in summary["metrics"].values())
    for size, backend in ((1, None), (2, "gloo")):
        world = world_of("cpu", size=size, devices=size, backend="gloo")
        summary = summary_of(trainer, run, world, status="stopped", another_attempt=True, metrics={"a": 1.0})
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary
        assert (summary["world_size"], summary["devices"], summary["backend"]) == (size, size, backend)
        assert (summary["status"], summary["another_attempt"], summary["metrics"]) == ("stopped", True, {"a": 1.0})


class Counting(MeanMetric):
    """Counts how often its value is computed, which on several ranks is a collective."""

    computed = 0

    def compute(self):
        self.computed += 1
        return super().compute()


class LogsMetric(BoringModel):
    """Reads at the end of the epoch, before the Trainer does, what has been computed."""

    def __init__(self):
        super().__init__()
        self.metric = Counting()

    def training_step(self, batch, batch_idx):
        self.metric.update(2.0)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.before = computed_metrics_of(self.trainer), self.metric.computed
        self.trainer.callback_metrics  # noqa: B018  # computes
        self.after = computed_metrics_of(self.trainer), self.metric.computed


def test_only_metrics_in_memory_are_read_if_computing_could_wait_for_a_lost_rank_or_for_an_accelerator(monkeypatch):
    model = LogsMetric()
    train_in_process(model=model, loops=True, max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    assert (model.before, model.after) == (({}, 0), ({"metric": 2.0}, 1))
    on_device = {"number": 2, "here": torch.tensor(1.5), "there": torch.tensor(1.5, device="meta")}
    monkeypatch.setattr(model.trainer._logger_connector, "_callback_metrics", on_device)
    assert computed_metrics_of(model.trainer) == {"here": 1.5, "number": 2.0}


def reason(error, cause=None):
    return reason_of(error, SimpleNamespace(failure_cause=lambda seconds: cause))


def test_the_reason_is_the_one_that_was_printed_or_the_traceback_and_what_the_rank_was_doing():
    assert reason(None) is None and reason(Stopped("SIGTERM")) == "SIGTERM"
    assert reason(RunError("the disk is full"), "rank 1 failed") == "the disk is full"
    for error in (AnotherRankFailed("lost"), RuntimeError("[gloo/x.cc:81] Connection closed by peer")):
        assert reason(error, "rank 1 on a failed: IndexError()") == "rank 1 on a failed: IndexError()"
    assert "AnotherRankFailed: lost" in reason(AnotherRankFailed("lost"))
    try:
        raise IndexError("no such layer")
    except IndexError as error:
        mark_place(error, "forward at step 7")
        found = reason(error)
    assert found.startswith("Traceback") and found.endswith("IndexError: no such layer\nin forward at step 7")
    cause, stack = "rank 1 on a failed: IndexError('several\nlines')", "".join(traceback.format_stack())
    for end in ("", f"; the main thread was at\n{stack}", f"\n{stack}"):
        assert without_stack(cause + end) == cause


def test_checkpoints_are_named_by_their_path_within_the_run_and_incomplete_ones_are_not_reported(trainer, run):
    for step, loss in ((5, 2.0), (10, 1.0), (15, 3.0)):
        path = run.checkpoints / f"step-{step:08d}"
        write_directory({"global_step": step, "rankzero": {"metrics": {"val/loss": loss}}}, path)
    summary = summary_of(trainer, run, keep_best="min:val/loss")
    assert summary["checkpoint"] == "checkpoints/step-00000015" and summary["best"] == "checkpoints/step-00000010"
    assert summary_of(trainer, run, keep_best="max:val/loss")["best"] == "checkpoints/step-00000015"
    assert summary_of(trainer, run)["best"] is None and summary_of(trainer, run, keep_best="min:other")["best"] is None
    (path / MANIFEST).unlink()
    (run.checkpoints / ".step-00000020.saving").mkdir()
    assert summary_of(trainer, run)["checkpoint"] == "checkpoints/step-00000010"
    (run.checkpoints / "step-00000010" / MANIFEST).write_text("{}")
    (run.checkpoints / "step-00000005").rename(run.checkpoints / "step-00000005.replaced")
    assert summary_of(trainer, run)["checkpoint"] == "checkpoints/step-00000005.replaced"
