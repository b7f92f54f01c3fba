"""Figures of runs in one process, from the module's outputs to TensorBoard and the run's directory."""

from itertools import cycle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from PIL import Image
from pretended_cuda import pretended_cuda
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Trainer
from rankzero.show.figures import callback, drawing
from rankzero.show.figures.callback import RunFigures
from rankzero.training.strategies import OneProcess
from running import script_process, small_figures
from stock import QUIET, Curves, log_calls

ALL = {"most_wrong", "confusion_matrix", "accuracy_by_class", "precision_recall", "training_inputs"}


class Data(LightningDataModule):
    """Twelve images of three classes."""

    class_names = ("cat", "$\\frac{dog", "a/b\n" + "x" * 300)

    def loader(self):
        generator = torch.Generator().manual_seed(0)
        images, labels = torch.rand(12, 3, 4, 4, generator=generator), torch.arange(12) % 3
        return DataLoader(TensorDataset(images, labels), batch_size=4)

    train_dataloader = val_dataloader = loader


class Net(LightningModule):
    """Returns what `returned` makes of logits and classes."""

    def __init__(self, returned=lambda logits, targets: {"logits": logits, "targets": targets}):
        super().__init__()
        self.returned, self.layer = returned, nn.Sequential(nn.Flatten(), nn.Linear(48, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return self.returned(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def empty_figures():
    with small_figures():
        yield


def fit(module=None, epochs=2, **settings):
    trainer = Trainer(max_epochs=epochs, name="x", **QUIET, **settings)
    trainer.fit(module or Net(), datamodule=Data())
    return trainer


def events_in(folder):
    return EventAccumulator(str(folder / "runs/x/tensorboard"), size_guidance={"images": 0, "tensors": 0}).Reload()


def files_in(folder):
    return {path.name.removesuffix(".png") for path in (folder / "runs/x/figures").glob("*")}


def warnings_in(recwarn):
    return [str(warning.message) for warning in recwarn if "figures" in str(warning.message)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The folder and the module of a run with figures."""
    folder = tmp_path_factory.mktemp("drawn")
    with script_process(folder):
        torch.manual_seed(0)
        return folder, fit().lightning_module


def test_a_classification_has_figures_in_tensorboard_and_in_the_run_directory(drawn):
    folder, _ = drawn
    assert files_in(folder) == ALL
    events = events_in(folder)
    assert set(events.Tags()["images"]) == {f"visuals/{name}" for name in ALL}
    assert [event.step for event in events.Images("visuals/most_wrong")] == [2, 5]  # the first and the last validation
    assert [event.step for event in events.Images("visuals/training_inputs")] == [0]
    curves = {tag for tag in events.Tags()["tensors"] if tag.startswith("pr_curves/")}
    assert len(curves) == 4 and {"pr_curves/cat", "pr_curves/__frac_dog", "pr_curves/micro average"} < curves
    newest = events.Images("visuals/most_wrong")[-1].encoded_image_string
    path = folder / "runs/x/figures/most_wrong.png"
    assert path.read_bytes() == newest and Image.open(path).width > 400
    assert "data:image/png" in (folder / "runs/x/report.html").read_text()


def test_a_regression_has_its_own_figure(script_folder):
    fit(Net(lambda logits, targets: {"predictions": logits, "targets": logits + 1}), epochs=1)
    assert files_in(script_folder) == {"training_inputs", "predicted_and_true"}


@pytest.mark.parametrize("returned", [lambda *_: None, lambda logits, targets: {"logits": logits, "targets": logits}])
def test_a_module_without_the_names_gets_nothing_and_exchanges_only_once(script_folder, monkeypatch, recwarn, returned):
    calls = []

    def observed(original):
        def call(figures, *arguments):
            with monkeypatch.context() as patch:
                for name in ("broadcast", "sum_in_place", "begin_gather_rows"):
                    patch.setattr(OneProcess, name, log_calls(getattr(OneProcess, name), calls, name))
                return original(figures, *arguments)

        return call

    for hook in ("on_validation_start", "on_validation_end"):
        monkeypatch.setattr(RunFigures, hook, observed(getattr(RunFigures, hook)))
    fit(Net(returned), epochs=3)
    assert files_in(script_folder) == {"training_inputs"}
    assert calls == ["broadcast", "begin_gather_rows"]  # the first of three validations
    assert warnings_in(recwarn) == []


def test_only_due_validations_are_drawn(script_folder, monkeypatch):
    drawn, clock = [], SimpleNamespace(now=100.0)

    class Timed(Net):
        def on_train_epoch_start(self):  # an epoch lasts a second
            clock.now = 100.0 + self.current_epoch

    def draw(publisher, *_):
        drawn.append(publisher.step)
        clock.now += 0.04

    monkeypatch.setattr(callback, "monotonic", lambda: clock.now)
    monkeypatch.setattr(drawing, "draw_validation", draw)
    fit(Timed(), epochs=10)
    assert drawn == [2, 17, 29]  # at least four seconds after the previous drawing, and at the end


def test_sanity_check_evaluation_and_fast_dev_run_draw_nothing(empty_figures, script_folder):
    trainer = fit(epochs=1, limit_train_batches=1, num_sanity_val_steps=2)
    assert [event.step for event in events_in(script_folder).Images("visuals/most_wrong")] == [0]
    for path in (script_folder / "runs/x/figures").iterdir():
        path.unlink()
    trainer.validate(Net(), datamodule=Data(), verbose=False)
    fit(fast_dev_run=2)
    assert not list(script_folder.glob("runs/*/figures/*"))


@pytest.mark.parametrize("function", ["draw_inputs", "draw_validation"])
def test_an_error_while_drawing_is_reported_once_and_training_continues(script_folder, monkeypatch, recwarn, function):
    draw = Mock(side_effect=RuntimeError("no fonts"))
    monkeypatch.setattr(drawing, function, draw)
    trainer = fit(epochs=3)
    (warning,) = warnings_in(recwarn)
    assert "no fonts" in warning and draw.call_count == 1 and trainer.current_epoch == 3
    assert files_in(script_folder) == ({"training_inputs"} if function == "draw_validation" else set())


class RaisingMapping(dict):
    def get(self, *_):
        raise RuntimeError("no such output")

    values = get


NAN = float("nan")
WIDTHS = cycle((2, 3))

ODD = {
    "targets that are no classes": (lambda x, y: {"logits": x, "targets": y + 1}, "for 3 classes"),
    "a mapping that raises": (lambda *_: RaisingMapping(), "no such output"),
    "another number of classes": (lambda x, y: {"logits": x[:, : next(WIDTHS)], "targets": y % 2}, "classes"),
    "NaN logits": (lambda x, y: {"logits": x * NAN, "targets": y}, None),
    "only ignored targets": (lambda x, y: {"logits": x, "targets": torch.full_like(y, -100)}, None),
    "wrong shapes": (lambda x, y: {"logits": x[:, :, None], "targets": y[:1]}, None),
    "NaN predictions": (lambda x, _: {"predictions": x * NAN, "targets": x}, None),
}


@pytest.mark.parametrize(("returned", "warning"), ODD.values(), ids=ODD)
def test_odd_outputs_never_end_training_and_an_error_is_reported_once(script_folder, recwarn, returned, warning):
    epochs = 3 if warning else 1
    trainer = fit(Net(returned), epochs)
    assert trainer.current_epoch == epochs and trainer.state.status == "finished"
    found = warnings_in(recwarn)
    assert len(found) == bool(warning), found
    assert not warning or ("rank 0 could not collect" in found[0] and warning in found[0])


def test_a_full_disk_is_a_warning(empty_figures, script_folder, monkeypatch, recwarn):
    monkeypatch.setattr(callback, "synced", Mock(side_effect=OSError(28, "No space left on device")))
    fit()
    assert len([text for text in warnings_in(recwarn) if "No space left" in text]) == 1
    assert files_in(script_folder) == set() and events_in(script_folder).Tags()["images"]


def test_loggers_that_accept_images_receive_them_on_request(empty_figures, script_folder):
    keys = set()

    class ImageLogger(Curves):
        def log_image(self, key, images):
            assert isinstance(images[0], Image.Image)
            keys.add(key)

    fit(logger=ImageLogger())
    assert not keys and files_in(script_folder) == ALL
    fit(logger=ImageLogger(), log_system=True, resume="never")
    assert keys == {f"rankzero/visuals/{name}" for name in ALL}


def test_inputs_of_each_attempt_are_drawn(empty_figures, script_folder):
    for epochs in (1, 2):
        fit(epochs=epochs)
    assert [event.step for event in events_in(script_folder).Images("visuals/training_inputs")] == [0, 3]


def test_the_results_of_training_do_not_depend_on_figures(drawn, script_folder, monkeypatch):
    monkeypatch.setattr(RunFigures, "on_ready", lambda *_: None)
    torch.manual_seed(0)
    assert all(map(torch.equal, drawn[1].parameters(), fit().lightning_module.parameters()))
    assert not files_in(script_folder)


def test_images_of_a_batch_on_a_gpu_are_drawn_on_the_host(monkeypatch):
    draw = Mock()
    monkeypatch.setattr(drawing, "draw_inputs", draw)
    monkeypatch.setattr(callback, "class_names", Mock())
    with pretended_cuda() as device:
        RunFigures(None, Mock(), Mock())._draw_inputs(Mock(), torch.rand(4, 3, 8, 8, device="cuda"))
        (_, images, *_), _ = draw.call_args
        assert not device.holds(images) and len(images) == 4
