import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from rich.cells import cell_len

from rankzero.runs.reports.shown_metrics import metrics_line, numbers, unique_metrics
from running import train_in_process

CASES = {
    "step and epoch": ({"loss": 1.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "the epoch's value counts": ({"loss": 2.0, "loss_step": 2.0, "loss_epoch": 1.0}, {"loss": 1.0}),
    "before the first epoch's end": ({"loss": 2.0, "loss_step": 2.0}, {"loss": 2.0}),
    "only one": ({"loss": 1.0}, {"loss": 1.0}),
    "a name that ends so": ({"time_step": 3.0, "best_epoch": 4.0}, {"time_step": 3.0, "best_epoch": 4.0}),
    "two metrics": ({"time": 1.0, "time_step": 3.0}, {"time": 1.0, "time_step": 3.0}),
    "loaders": (
        {f"a{kind}/dataloader_idx_{n}": float(n) for kind in ("", "_step", "_epoch") for n in (0, 1)},
        {"a/dataloader_idx_0": 0.0, "a/dataloader_idx_1": 1.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_metric_is_shown_once(name):
    metrics, shown = CASES[name]
    assert unique_metrics(metrics) == shown


def test_a_metric_logged_per_step_and_epoch_is_shown_once():
    class LoggingModel(BoringModel):
        def training_step(self, batch, batch_idx):
            self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_end(self):
            self.logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    model = LoggingModel()
    train_in_process(model=model, max_epochs=1, limit_train_batches=3)
    assert {"loss", "loss_step", "loss_epoch"} <= set(model.logged)
    shown = unique_metrics(model.logged)
    assert {name: shown[name] for name in shown if "loss" in name and "val" not in name} == {"loss": 1.0}


def test_only_numbers_are_metrics():
    metrics = {"loss": torch.tensor(0.5), "count": 3}
    others = {"text": "abc", "vector": torch.ones(2), "nothing": None, "list": []}
    assert numbers({**metrics, **others}) == {"loss": 0.5, "count": 3.0}


def test_a_line_with_any_characters_fits_its_width_and_states_how_many_metrics_are_omitted():
    metrics = {f"metric_{number:02}": float(number) for number in range(30)}
    line = metrics_line("epoch 1/2 done  step 3", metrics, ["metric_29"], "7 s", 120)
    assert len(line) <= 120 and line.startswith("epoch 1/2 done  step 3  metric_29 29  metric_00 0  ")
    shown = line.count("metric_")
    assert line.endswith(f"  +{30 - shown} more  7 s") and shown > 4
    assert metrics_line("head", {"x" * 200: 1.0}, [], "tail", 120) == "head  +1 more  tail"
    assert metrics_line("head", {}, [], "tail", 120) == "head  tail"
    line = metrics_line("head", {"損失" * 12: 1.0, "a\nb\x1b[31m": 2.0, "w" * 30: 3.0}, (), "tail")
    assert cell_len(line) <= 120 and line.isprintable() and "a?b?[31m 2" in line
