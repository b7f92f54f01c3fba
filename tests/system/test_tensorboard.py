"""Shows runs in TensorBoard, in Chromium."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from running import require
from system.browser import chromium, read_json, tensorboard
from system.forks import fit_on_ranks

pytestmark = pytest.mark.xdist_group("tensorboard")

RUNS = {"pair/tensorboard", "three/tensorboard", "small/tensorboard"}
PAGES = ("timeseries", "custom_scalars", "images")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Returns the root of a run of two processes on Fashion-MNIST, of one with three attempts, and of another model."""
    folder = tmp_path_factory.mktemp("shown")
    fit_on_ranks("--name", "pair", "--data", "FashionMNIST", "--model", "MLP", "--epochs", "2", folder=folder, world=2)
    for steps in ("30", "60", "-1"):
        fit_on_ranks("--name", "three", "--epochs", "4", "--trainer.max_steps", steps, folder=folder)
    fit_on_ranks("--name", "small", "--model", "MLP", "--epochs", "2", folder=folder)
    return folder / "runs"


@pytest.fixture(scope="module")
def address(root) -> Iterator[str]:
    """Yields the address of a TensorBoard that shows these runs, started as `fit` prints it."""
    require("chromium")
    with tensorboard("--logdir", str(root), "--host", "localhost", runs=RUNS) as address:
        assert set(read_json(f"{address}/data/runs")) == RUNS
        yield address


def test_three_attempts_are_one_curve_charts_are_grouped_and_images_have_the_names_of_classes(address):
    points = read_json(f"{address}/data/plugin/scalars/scalars?run=three%2Ftensorboard&tag=train%2Floss")
    assert [step for _, step, _ in points] == [*range(9, 92, 10)]
    layout = read_json(f"{address}/data/plugin/custom_scalars/layout")
    titles = [category["title"] for category in layout["category"]]
    assert titles == ["1. Learning", "2. Speed", "3. Ranks", "4. Memory and checkpoints"]
    images = read_json(f"{address}/data/plugin/images/tags")["pair/tensorboard"]
    names = ("accuracy_by_class", "confusion_matrix", "most_wrong", "precision_recall", "training_inputs")
    assert set(images) == {f"visuals/{name}" for name in names}
    curves = read_json(f"{address}/data/plugin/pr_curves/tags")["pair/tensorboard"]
    assert {"pr_curves/Ankle boot", "pr_curves/Shirt"} <= set(curves)


def test_the_first_charts_are_those_of_the_model_and_hyperparameters_of_all_models_are_compared(address, tmp_path):
    page = chromium(tmp_path, f"{address}/#timeseries", "--virtual-time-budget=20000", "--dump-dom")
    groups = re.findall(r'class="group-title" title="([^"]*)"', page)
    assert groups[:3] == ["train", "val", "visuals"]
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/data/plugin/hparams/experiment", b"{}", headers, method="POST")
    experiment = read_json(request)
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"model.depth", "model.class_path", "global_batch_size", "processes", "max_epochs"} <= names
    metrics = {info["name"]["tag"] for info in experiment["metricInfos"]}
    assert {"train/loss", "val/accuracy", "val/loss"} <= metrics


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn(page, address, tmp_path):
    screenshots = []
    for attempt in range(3 if page == "timeseries" else 1):  # its charts are drawn by threads that may be late
        file = tmp_path / f"{page}-{attempt}.png"
        settings = ("--window-size=1400,1000", "--virtual-time-budget=20000", f"--screenshot={file}")
        chromium(tmp_path, f"{address}/#{page}", *settings)
        with Image.open(file) as image:
            assert image.size == (1400, 1000)
            screenshots.append((len(image.convert("RGB").getcolors(maxcolors=2**24)), file))
    colors, best = max(screenshots)
    best.rename(tmp_path / f"{page}.png")
    assert colors > 100  # an empty page has a few dozen
