import csv
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from rankzero import Trainer
from stock import QUIET, Loaders, Net


def test_a_resumed_run_keeps_the_rows_of_a_csv_logger_and_logs_no_step_twice(script_folder, recwarn):
    class Crash(Callback):
        def on_train_batch_start(self, trainer, *arguments):
            if trainer.global_step == 13:  # saved last after step 8
                raise RuntimeError("crash")

    def fit(**settings):
        logger = CSVLogger(".", name="", version="logs")
        Trainer(name="x", logger=logger, log_every_n_steps=2, **{"max_epochs": 2, **QUIET, **settings}).fit(
            Net(), Loaders()()
        )

    def steps():
        with Path("logs/metrics.csv").open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]

    with pytest.raises(RuntimeError, match="crash"):
        fit(callbacks=[Crash()])
    assert steps() == [1, 3, 5, 7, 9, 11]
    for settings, count in (({}, 16), ({"max_epochs": 3}, 24), ({"max_epochs": 3}, 24)):
        fit(**settings)
        assert steps() == list(range(1, count, 2))
    assert not [warning for warning in recwarn if "will be deleted" in str(warning.message)]
    fit(resume="never", max_epochs=1)
    assert steps() == [1, 3, 5, 7]
