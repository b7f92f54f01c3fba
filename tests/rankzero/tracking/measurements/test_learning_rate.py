import csv

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from rankzero.tracking.measurements.learning_rate import LearningRate
from running import train_in_process


class ModelWithRates(BoringModel):
    def __init__(self, *rates):
        super().__init__()
        self.rates = rates

    def configure_optimizers(self):
        groups = [
            {"params": [parameter], "lr": rate} for parameter, rate in zip(self.parameters(), self.rates, strict=False)
        ]
        return torch.optim.SGD(groups) if groups else None


def logged_rates(folder, *rates, every=1):
    logger = CSVLogger(folder, name="", version="")
    train_in_process(
        LearningRate(),
        model=ModelWithRates(*rates),
        loops=True,
        logger=logger,
        limit_train_batches=2,
        max_epochs=1,
        log_every_n_steps=every,
    )
    file = folder / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if file.exists() else []
    return {name: float(value) for row in rows for name, value in row.items() if name.startswith("train/lr") and value}


def test_each_parameter_group_has_its_own_curve(tmp_path):
    assert logged_rates(tmp_path, 0.5, 0.25) == {"train/lr": 0.5, "train/lr-1": 0.25}


def test_every_logger_receives_the_learning_rate(tmp_path):
    loggers = [CSVLogger(tmp_path / name, name="", version="") for name in ("first", "second")]
    train_in_process(
        LearningRate(),
        model=ModelWithRates(0.5),
        loops=True,
        logger=loggers,
        limit_train_batches=2,
        max_epochs=1,
        log_every_n_steps=1,
    )
    for name in ("first", "second"):
        rows = list(csv.DictReader((tmp_path / name / "metrics.csv").open()))
        assert {row["train/lr"] for row in rows} == {"0.5"}


def test_module_without_an_optimizer_logs_no_learning_rate(tmp_path):
    assert logged_rates(tmp_path) == {}


def test_log_every_n_steps_of_zero_logs_nothing(tmp_path):
    assert logged_rates(tmp_path, 0.5, every=0) == {}
