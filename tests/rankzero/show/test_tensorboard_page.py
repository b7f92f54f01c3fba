import re

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from reported import PARTS_MS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from rankzero import Trainer
from rankzero.show.report.curves import SERIES
from rankzero.show.tensorboard_page import LAYOUT, attempt_text, hyper_parameters_of
from running import script_process
from stock import QUIET


class Net(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.5)


def fit(epochs, model=Net, **settings):
    torch.manual_seed(0)  # the data of all attempts is the same
    settings |= {"limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 2, **QUIET}
    Trainer(max_epochs=epochs, name="x", **settings).fit(model())


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """The TensorBoard folder of a run with two attempts, and its events."""
    folder = tmp_path_factory.mktemp("attempts")
    with script_process(folder):
        for epochs in (1, 2):
            fit(epochs, gradient_clip_val=0.5)
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
    assert "Net" in values["model.class_path"].string_value
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
    class Keyed(Net):
        def __init__(self, api_key, num_tokens):
            super().__init__()
            self.save_hyperparameters()

    fit(1, lambda: Keyed("abc-hidden", 512))
    folder = script_folder / "runs/x/tensorboard"
    assert b"abc-hidden" not in b"".join(path.read_bytes() for path in folder.iterdir())
    assert "num_tokens: 512" in (folder / "hparams.yaml").read_text()
    config = {"model": {"init_args": {"api_key": "hidden", "depth": 3}}, "trainer": {"logger": [{"token": "hidden"}]}}
    assert hyper_parameters_of(config) == {"model.depth": 3}
    assert "hidden" not in attempt_text(1, 0, {"command": ["fit.py", "--model.api_key", "hidden"]})
