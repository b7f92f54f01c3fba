import csv
import json
import os
from itertools import count
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rankzero import Trainer
from running import script_process
from stock import QUIET, Loaders, Net


class OnServer(Logger):
    """What these tests use of a logger whose server gives each run an id: `runs` are the ids on the server."""

    numbers = count()

    def __init_subclass__(cls):
        cls.runs = []

    def __init__(self):
        Logger.__init__(self)
        self._run_id = None

    @property
    def experiment(self):
        given = self._run_id or os.environ.get("WANDB_RUN_ID")
        if given and given not in self.runs:
            raise KeyError(given)
        self._run_id = given or f"run-{next(self.numbers)}"
        self.runs.append(self._run_id)

    @property
    def version(self):
        return self._run_id

    name = save_dir = property(lambda self: None)
    log_metrics = log_hyperparams = finalize = after_save_checkpoint = lambda self, *_, **__: None


class OnMLflow(OnServer, MLFlowLogger):
    pass


class OnWandb(OnServer, WandbLogger):
    pass


def crash(trainer, *_):
    if trainer.global_step == 13:  # saved last after step 8
        raise RuntimeError("crash")


def fit(*loggers, **settings):
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "name": "x", **QUIET, **settings}
    trainer = Trainer(logger=[*loggers], **settings)
    trainer.fit(Net(), Loaders()())
    return trainer


def fit_with_a_crash(*loggers, **settings):
    with pytest.raises(RuntimeError, match="crash"):
        fit(*loggers, callbacks=[LambdaCallback(on_train_batch_start=crash)], **settings)


def rows(folder, column="loss"):
    with Path(folder, "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[column]]


def curve(folder):
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def test_a_resumed_run_keeps_the_rows_of_a_csv_logger_and_logs_no_step_twice(script_folder, recwarn):
    def logger():
        return CSVLogger(".", name="", version="logs")

    fit_with_a_crash(logger())
    assert rows("logs") == [1, 3, 5, 7, 9, 11]
    for settings, steps in (({}, 16), ({"max_epochs": 3}, 24), ({"max_epochs": 3}, 24)):
        fit(logger(), **settings)
        assert rows("logs") == list(range(1, steps, 2))
    assert not [warning for warning in recwarn if "will be deleted" in str(warning.message)]
    fit(logger(), resume="never", max_epochs=1)
    assert rows("logs") == [1, 3, 5, 7]


def test_a_resumed_run_keeps_the_version_of_each_logger_and_logs_no_step_twice(script_folder):
    def loggers():
        return CSVLogger("csv"), TensorBoardLogger("tb"), CSVLogger("csv", name="b"), OnMLflow(), OnWandb()

    fit_with_a_crash(*loggers())
    trainer = fit(*loggers())
    folders = "csv/lightning_logs/version_0", "tb/lightning_logs/version_0", "csv/b/version_0"
    assert [logger.log_dir for logger in trainer.loggers[:3]] == list(folders)
    assert rows(folders[0]) == rows(folders[2]) == curve(folders[1]) == list(range(1, 16, 2))
    assert len({*OnMLflow.runs}) == len({*OnWandb.runs}) == 1 and "WANDB_RUN_ID" not in os.environ
    recorded = json.loads(Path("runs/x/run.json").read_text())["loggers"]
    assert [logger["version"] for logger in recorded.values()] == [0, 0, 0, *OnMLflow.runs[:1], *OnWandb.runs[:1]]

    assert [one.version for one in fit(*loggers(), name="other").loggers[:3]] == [1, 1, 1]
    elsewhere = fit(CSVLogger("csv2"), TensorBoardLogger("tb", name="c"), max_epochs=3).loggers
    assert [one.log_dir for one in elsewhere] == ["csv2/lightning_logs/version_0", "tb/c/version_0"]
    assert [one.version for one in fit(*loggers(), resume="never").loggers[:3]] == [2, 2, 2]


def test_a_run_that_the_server_has_lost_is_followed_by_a_new_one(script_folder, capsys):
    fit_with_a_crash(OnMLflow())
    lost = OnMLflow.runs[-1]
    OnMLflow.runs.clear()
    fit(OnMLflow())
    assert f"OnMLflow begins a new run, because run {lost} cannot be continued" in capsys.readouterr().out
    assert OnMLflow.runs and lost not in OnMLflow.runs


def test_values_that_a_script_logs_between_two_fits_and_after_the_last_are_kept(tmp_path):
    class Tested(Net):
        def test_step(self, batch, batch_idx):
            self.log("tested", 1.0)

    with script_process(tmp_path):
        trainer = Trainer(max_epochs=1, name="x", logger=CSVLogger("csv"), **QUIET)
        trainer.fit(Tested(), Loaders()())
        for epochs in (2, 3):
            trainer.test(dataloaders=Loaders()(), verbose=False)
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(trainer.lightning_module, Loaders()())
    assert rows(tmp_path / "csv/lightning_logs/version_0", "tested") == [8, 16]
