import csv
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from reported import PARTS_MS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from rankzero import Trainer
from rankzero.show.loggers import LAYOUT, attempt_text, hyper_parameters_of
from rankzero.show.report.curves import SERIES
from running import script_process
from stock import QUIET, Loaders, Net

RUNS: dict[str, str] = {}
"""Id -> state of the runs on the server."""


class OnServer(Logger):
    """What these tests use of a logger whose server gives each run an id, without a server."""

    def __init__(self, run_id=None):
        Logger.__init__(self)
        self._run_id = self._id = run_id
        self._tracking_uri, self._wandb_init = "server", {"id": run_id}

    @property
    def experiment(self):
        self._run_id = self._id = self._run_id or self._wandb_init["id"] or f"{type(self).__name__}-{len(RUNS)}"
        RUNS.setdefault(self._run_id, "active")

    def log_hyperparams(self, *_):
        if RUNS[self._run_id].startswith("logged"):
            raise ValueError("Changing param values is not allowed\n")

    version = property(lambda self: self._id)
    name = save_dir = property(lambda self: None)
    log_metrics = finalize = after_save_checkpoint = lambda self, *_, **__: None


OnMLflow = type("OnMLflow", (OnServer, MLFlowLogger), {})
OnWandb = type("OnWandb", (OnServer, WandbLogger), {})


@pytest.fixture(autouse=True)
def server(monkeypatch):
    def get_run(run_id):
        return SimpleNamespace(info=SimpleNamespace(lifecycle_stage=RUNS[run_id].removeprefix("logged ")))

    RUNS.clear()
    client = SimpleNamespace(MlflowClient=lambda uri: SimpleNamespace(get_run=get_run))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", client)
    return RUNS


def crash(trainer, *_):
    if trainer.global_step == 13:  # saved last after step 8
        raise RuntimeError("crash")


def fit(*loggers, **settings):
    settings = {"max_epochs": 2, "log_every_n_steps": 2, "name": "x", **QUIET, **settings}
    trainer = Trainer(logger=[*loggers], **settings)
    net = Net()
    net.save_hyperparameters({"lr": 0.1})
    trainer.fit(net, Loaders()())
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


def test_a_resumed_run_keeps_the_version_of_each_logger_and_logs_no_step_twice(script_folder, server):
    def loggers():
        return CSVLogger("csv"), TensorBoardLogger("tb"), CSVLogger("csv", name="b"), OnMLflow(), OnWandb()

    fit_with_a_crash(*loggers())
    trainer = fit(*loggers())
    folders = "csv/lightning_logs/version_0", "tb/lightning_logs/version_0", "csv/b/version_0"
    assert [logger.log_dir for logger in trainer.loggers[:3]] == list(folders)
    assert rows(folders[0]) == rows(folders[2]) == curve(folders[1]) == list(range(1, 16, 2))
    recorded = json.loads(Path("runs/x/run.json").read_text())["loggers"]
    assert [*recorded.values()] == [0, 0, 0, *sorted(server)] == [logger.version for logger in trainer.loggers]
    trainer = fit(*reversed(loggers()), max_epochs=3)  # the order does not matter, and a finished run resumes
    assert [logger.version for logger in trainer.loggers] == [*reversed(recorded.values())]
    assert rows(folders[0]) == rows(folders[2]) == curve(folders[1]) == list(range(1, 24, 2))

    assert [one.version for one in fit(*loggers(), name="other").loggers[:3]] == [1, 1, 1]
    elsewhere = fit(CSVLogger("csv2"), TensorBoardLogger("tb", name="c"), max_epochs=3).loggers
    assert [one.log_dir for one in elsewhere] == ["csv2/lightning_logs/version_0", "tb/c/version_0"]
    assert [one.version for one in fit(*loggers(), resume="never").loggers[:3]] == [2, 2, 2]


def test_the_last_checkpoint_is_searched_for_in_the_version_of_the_logger_that_the_run_continues(script_folder):
    for epochs in (1, 2):
        callbacks = [ModelCheckpoint(save_last=True)]  # in the folder of the version
        settings = {"max_epochs": epochs, "name": "x", **QUIET, "enable_checkpointing": True}
        trainer = Trainer(logger=[TensorBoardLogger("tb")], callbacks=callbacks, **settings)
        trainer.fit(Net(), Loaders()(), ckpt_path="last")
        assert trainer.logger.log_dir == "tb/lightning_logs/version_0" and trainer.current_epoch == epochs


@pytest.mark.parametrize("state", ["deleted", None])
def test_a_run_that_mlflow_has_deleted_is_followed_by_a_new_one(script_folder, capsys, server, state):
    fit_with_a_crash(OnMLflow())
    server.update({"OnMLflow-0": state} if state else {"other": server.pop("OnMLflow-0")})
    assert fit(OnMLflow()).logger.version == "OnMLflow-1"
    assert "OnMLflow begins a new run, because run OnMLflow-0 cannot be continued" in capsys.readouterr().out


def test_mlflow_keeps_changed_hyperparameters_and_an_id_of_the_user_is_used(script_folder, capsys, server):
    fit_with_a_crash(OnMLflow(), OnWandb())
    (run,) = (name for name in server if "MLflow" in name)
    server[run] = "logged active"
    assert [logger.version for logger in fit(OnMLflow(), OnWandb("own")).loggers] == [run, "own"]
    assert f"run {run} of MLflow keeps its hyperparameters: Changing param" in capsys.readouterr().out
    assert fit(OnMLflow("own"), max_epochs=3).logger.version == "own"


@pytest.mark.parametrize("content", ["", "epoch,loss,step\n0,1.0,1\n0,1"])
def test_a_csv_file_that_was_cut_or_is_left_under_another_name_is_continued(script_folder, content):
    fit_with_a_crash(CSVLogger("csv"))
    file = Path("csv/lightning_logs/version_0/metrics.csv")
    file.write_text(content)
    file.rename(f"{file}.kept")  # as if killed before the file was given back its name
    fit(CSVLogger("csv"))
    assert rows(file.parent) == [1] * bool(content) + [9, 11, 13, 15]


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


class Boring(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.5)


def fit_boring(epochs, model=Boring, **settings):
    torch.manual_seed(0)  # the data of all attempts is the same
    settings |= {"limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 2, **QUIET}
    Trainer(max_epochs=epochs, name="x", **settings).fit(model())


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """The TensorBoard folder of a run with two attempts, and its events."""
    folder = tmp_path_factory.mktemp("attempts")
    with script_process(folder):
        for epochs in (1, 2):
            fit_boring(epochs, gradient_clip_val=0.5)
    folder = folder / "runs/x/tensorboard"
    return folder, EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def texts(events, tag):
    return [make_ndarray(event.tensor_proto).item().decode() for event in events.Tensors(f"{tag}/text_summary")]


def test_a_run_shows_configuration_environment_attempts_and_hyperparameters_without_a_second_directory(attempts):
    folder, events = attempts
    first, second = texts(events, "run/attempts")
    assert first.startswith("Attempt 1 began after step 0 on ") and "```sh\n" in first
    assert second.startswith("Attempt 2 began after step 4 on ")
    assert "max_epochs: 2" in texts(events, "run/configuration")[-1]
    assert re.search(r"\| torch \| 2\.", texts(events, "run/environment")[-1])
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    values = metadata.parse_session_start_info_plugin_data(content).hparams
    expected = {"gradient_clip_val": 0.5, "processes": 1, "global_batch_size": 1}
    assert {name: values[name].number_value for name in expected} == expected
    assert "Boring" in values["model.class_path"].string_value
    assert metadata.EXPERIMENT_TAG not in events.summary_metadata  # it would hide those of other models
    assert all(path.is_file() for path in folder.iterdir())


def test_series_have_descriptions_a_layout_and_no_group_that_precedes_those_of_the_model(attempts):
    _, events = attempts
    assert events.summary_metadata["train/loss"].summary_description == SERIES["train/loss"].description
    assert events.summary_metadata["wall_time/step_ms"].summary_description.startswith("Milliseconds")
    tags = sorted(events.Tags()["scalars"])
    assert tags[0] == "train/loss" and "epoch" not in tags
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in tags))
    assert groups == ["train", "val", "wall_time", "weights", "workload", "x_axis"]
    layouts = events.Tensors("custom_scalars__config__")
    for layout in [Layout.FromString(make_ndarray(event.tensor_proto).item()) for event in layouts]:
        assert [category.title for category in layout.category] == list(LAYOUT)
    assert layouts


@pytest.mark.parametrize(
    ("chart", "expected"),
    [
        ("loss", {"train/loss", "train/mean_loss", "val_loss", "val/loss", "loss_step"}),
        ("metrics", {"accuracy", "val/accuracy", "train_acc", "train/f1"}),
        ("learning rate", {"train/lr", "train/lr-1"}),
        ("samples per second", {"train/samples_per_second"}),
        ("parts of a step (ms)", {f"wall_time/{part}_ms" for part in PARTS_MS}),
        ("waiting for data (ms per step)", {"world/data_wait_ms/rank_001"}),
    ],
)
def test_charts_contain_the_series_of_any_module(chart, expected):
    patterns = next(kinds[1] for charts in LAYOUT.values() for title, kinds in charts.items() if title == chart)
    users = ("val_loss", "val/loss", "accuracy", "val/accuracy", "loss_step", "train_acc", "train/f1")
    ranks = ("world/first_gradient_ms/rank_001", "world/data_wait_ms/rank_001")
    tags = [*(tag for tag in SERIES if "/" in tag), "train/mean_loss", "train/lr", "train/lr-1", *ranks, *users]
    assert {tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)} == expected


def test_secrets_are_in_no_file_no_hyperparameter_and_no_text(script_folder):
    class Keyed(Boring):
        def __init__(self, api_key, num_tokens):
            super().__init__()
            self.save_hyperparameters()

    fit_boring(1, lambda: Keyed("abc-hidden", 512))
    folder = script_folder / "runs/x/tensorboard"
    assert b"abc-hidden" not in b"".join(path.read_bytes() for path in folder.iterdir())
    assert "num_tokens: 512" in (folder / "hparams.yaml").read_text()
    config = {"model": {"init_args": {"api_key": "hidden", "depth": 3}}, "trainer": {"logger": [{"token": "hidden"}]}}
    assert hyper_parameters_of(config) == {"model.depth": 3}
    assert "hidden" not in attempt_text(1, 0, {"command": ["fit.py", "--model.api_key", "hidden"]})
