import json
import math
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from reported import PARTS_MS, scalars_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Trainer
from rankzero.distributed.monitoring import activity
from rankzero.runs.metrics_file import read_rows
from rankzero.show.measurements import interval_measurements
from rankzero.show.measurements.interval_measurements import learning_rates
from running import script_process
from stock import QUIET, Curves

SAMPLES, BATCH, INTERVAL = 45, 4, 5
"""An epoch has 12 steps, the last one with a single sample."""


class Net(LightningModule):
    """Records the losses of all samples by step."""

    def __init__(self, manual=False, name=None, outputs="tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.name, self.outputs, self.losses = nn.Linear(3, 1), name, outputs, defaultdict(list)
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = (self.layer(inputs) - targets).square().squeeze(1)
        self.losses[self.trainer.fit_loop.epoch_loop.steps_done] += losses.tolist()
        loss = losses.mean()
        if self.name:
            self.log(self.name, loss)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return {"none": None, "tensor": loss, "mapping": {"loss": loss}}[self.outputs]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)


def fit(module, name="x", epochs=3, ckpt_path=None, **settings):
    """Trains in the working directory, and returns the curves of the run."""
    settings = {"log_every_n_steps": INTERVAL, "seed": 7, **QUIET, **settings}
    Trainer(max_epochs=epochs, name=name, **settings).fit(module, ckpt_path=ckpt_path)
    folder = Path("runs", name)
    return scalars_of(folder) if (folder / "tensorboard").exists() else {}


def means_of(losses):
    """Returns the mean loss of each whole interval, by the step at which the interval is logged."""
    ends = range(INTERVAL - 1, max(losses) + 1, INTERVAL)
    samples = {end: [loss for step in range(end - INTERVAL + 1, end + 1) for loss in losses[step]] for end in ends}
    return {end: sum(values) / len(values) for end, values in samples.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The module and the curves of a run that is not interrupted."""
    net = Net()
    with script_process(tmp_path_factory.mktemp("whole")):
        return net, fit(net)


@pytest.fixture
def detailed(monkeypatch):
    """Logs details at each logging step."""
    monkeypatch.setattr(interval_measurements, "DETAIL_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        ({}, {}),
        ({"outputs": "mapping"}, {}),
        ({"manual": True}, {}),
        ({}, {"accumulate_grad_batches": 2}),
        ({}, {"global_batch_size": 8, "max_device_batch_size": 3}),
        ({}, {"profiler": "simple"}),  # Lightning's own loop
        ({"outputs": "mapping"}, {"profiler": "simple", "accumulate_grad_batches": 2}),
    ],
)
def test_the_logged_loss_is_the_mean_over_all_samples_of_the_interval(script_folder, module, settings):
    net = Net(**module)
    logged = fit(net, **settings)
    expected = means_of(net.losses)
    assert len(expected) >= 3 and logged["train/loss"] == pytest.approx(expected, rel=1e-6)


def test_a_module_that_logs_loss_or_rate_itself_keeps_its_own_values_and_one_without_a_loss_has_no_curve(script_folder):
    class OwnRate(Net):
        def training_step(self, batch, batch_idx):
            self.log("train/lr", 123.0)
            return super().training_step(batch, batch_idx)

    net = Net(name="train/loss")
    logged = fit(net)
    assert logged["train/mean_loss"] == pytest.approx(means_of(net.losses), rel=1e-6)
    last_batches = {step: sum(net.losses[step]) / len(net.losses[step]) for step in logged["train/loss"]}
    assert logged["train/loss"] == pytest.approx(last_batches, rel=1e-6)
    assert not {"train/loss", "train/mean_loss"} & fit(Net(manual=True, outputs="none"), name="none").keys()
    assert fit(OwnRate(), name="rate")["train/lr"] == dict.fromkeys(range(4, 36, 5), 123.0)


def test_the_curves_of_stopped_and_lost_attempts_are_those_of_an_uninterrupted_run(script_folder, whole):
    def crash(trainer, *_):
        if trainer.global_step == 27:
            raise RuntimeError("crash")

    for steps in (8, 22):  # in the middle of an interval, and of an epoch
        fit(Net(), max_steps=steps)
    with pytest.raises(RuntimeError, match="crash"):
        # Saved last at step 24, within the interval that it has logged.
        fit(Net(), callbacks=[LambdaCallback(on_train_batch_end=crash)])
    parts = fit(Net())
    for tag in ("train/loss", "train/lr", "weights/gradient_norm"):
        assert parts[tag] == pytest.approx(whole[1][tag], rel=1e-6) and len(parts[tag]) >= 7, tag
    assert sorted(set(parts["x_axis/attempt"].values())) == [1, 2, 4]


def test_the_gradient_norm_is_that_before_clipping(script_folder):
    norms = {}

    class Recording(Net):
        def on_before_optimizer_step(self, optimizer):
            step = self.trainer.fit_loop.epoch_loop.steps_done
            norms[step] = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in self.parameters()))

    stock = {"profiler": "simple"}  # Lightning's own loop
    for name, module, settings in (("observed", Recording, {}), ("unobserved", Net, {}), ("stock", Net, stock)):
        logged = fit(module(), name=name, gradient_clip_val=0.01, **settings)["weights/gradient_norm"]
        assert logged == pytest.approx({step: norms[step] for step in logged}, rel=1e-5) and len(logged) >= 7


def test_measuring_changes_no_weights(script_folder, whole, monkeypatch):
    monkeypatch.setattr(interval_measurements.IntervalMeasurements, "on_ready", lambda *arguments: None)
    plain = Net()
    assert "weights/gradient_norm" not in fit(plain)
    assert all(map(torch.equal, whole[0].parameters(), plain.parameters()))


@pytest.mark.parametrize(
    ("step_seconds", "detail_seconds", "steps"),
    [
        (0.06, 1.0, [4, 24, 44, 64, 84, 104]),  # four intervals of five steps last longer than a second
        (0.1, None, range(4, 108, 5)),  # all of them, if steps are slow
    ],
)
def test_details_are_logged_at_limited_intervals(script_folder, monkeypatch, step_seconds, detail_seconds, steps):
    net = Net()
    if detail_seconds:
        monkeypatch.setattr(interval_measurements, "DETAIL_SECONDS", detail_seconds)
    monkeypatch.setattr(interval_measurements, "monotonic", lambda: 100 + net.global_step * step_seconds)
    logged = fit(net, epochs=9)
    assert len(logged["train/loss"]) == 21 and list(logged["wall_time/step_ms"]) == list(steps)
    assert logged["weights/gradient_norm"].keys() == logged["train/loss"].keys()


def test_details_of_an_interval_are_correct_and_consistent(detailed, script_folder, whole, monkeypatch):
    monkeypatch.setattr(interval_measurements, "peak_flops_per_second", lambda trainer: 2e12)
    logged = fit(Net(), save_every="5steps")
    samples, epochs = {4: 20, 9: 40, 14: 57, 19: 77, 24: 94, 29: 114, 34: 134}, (5, 10, 15, 20, 25, 30, 35)
    assert logged["x_axis/samples"] == samples and set(logged["x_axis/attempt"].values()) == {1}
    assert {row.step: row.samples for row in read_rows(Path("runs/x")) if "train/lr" in row.values} == samples
    assert list(logged["x_axis/epoch"].values()) == pytest.approx([steps / 12 for steps in epochs])
    for step, total in logged["wall_time/step_ms"].items():
        assert sum(logged[f"wall_time/{part}_ms"][step] for part in PARTS_MS) == pytest.approx(total, rel=1e-5)
    flops = logged["workload/teraflops_per_second"][4] * 1e12 / logged["train/samples_per_second"][4]
    assert flops == pytest.approx(2 * 2 * 3, rel=1e-4)  # forward, and the weights' gradient; the inputs need none
    assert logged["workload/mfu_percent"][4] == pytest.approx(50 * logged["workload/teraflops_per_second"][4], rel=1e-5)
    description = EventAccumulator("runs/x/tensorboard").Reload().summary_metadata["workload/mfu_percent"]
    end = "the published peak of the device: 2 TFLOP/s with precision 32-true"
    assert description.summary_description.endswith(end)
    assert "workload/teraflops_per_second" in whole[1] and "workload/mfu_percent" not in whole[1]  # a CPU has no peak
    size = sum(file.stat().st_size for file in next(Path("runs/x/checkpoints").iterdir()).iterdir()) / 2**20
    assert list(logged["workload/checkpoint_mib"].values())[-1] == pytest.approx(size, rel=0.1)
    assert all(seconds > 0 for seconds in logged["wall_time/checkpoint_s"].values())


@pytest.mark.parametrize("settings", [{}, {"profiler": "simple"}])  # with a profiler, Lightning's own loop trains
def test_a_users_logger_receives_the_series_on_request_in_the_rows_of_the_user(script_folder, settings):
    plain, logger, without = Curves(), Curves(), Curves()
    fit(Net(name="loss"), name="plain", logger=plain, **settings)
    logged = fit(Net(name="loss"), logger=[logger], log_system=True, **settings)
    fit(Net(), name="without", logger=without, log_system=True, epochs=1, **settings)
    rows = [(step, {tag: value for tag, value in row.items() if "/" not in tag}) for step, row in logger.lines]
    assert rows == plain.lines and {"loss", "epoch"} == plain.lines[0][1].keys()
    assert [(step, row["epoch"]) for step, row in without.lines] == [(4, 0), (9, 0)]
    for lines in (logger.lines, without.lines):
        added = {"train/loss", "train/lr", "wall_time/step_ms", "x_axis/samples", "weights/gradient_norm"}
        assert {f"rankzero/{tag}" for tag in added} <= lines[0][1].keys()
    assert [row["rankzero/train/loss"] for _, row in logger.lines] == pytest.approx([*logged["train/loss"].values()])


@pytest.mark.parametrize("settings", [{"logger": False}, {"log_every_n_steps": 0}])
def test_nothing_is_measured_without_a_logger_or_an_interval(script_folder, settings):
    net = Net()
    assert not {"train/lr", "train/loss"} & fit(net, **settings).keys()
    record = net.trainer.fit_loop.epoch_loop.record
    assert not record.is_enabled and record.samples == 0


def test_training_continues_if_a_value_cannot_be_measured(detailed, script_folder, monkeypatch, recwarn):
    monkeypatch.setattr(interval_measurements, "memory_in_use", Mock(side_effect=OSError("/proc is not mounted")))
    logged = fit(Net())
    warnings = [str(warning.message) for warning in recwarn if "/proc is not mounted" in str(warning.message)]
    assert len(warnings) == 1 and "missing in the charts" in warnings[0]
    assert "workload/host_memory_gib" not in logged and len(logged["wall_time/step_ms"]) == 7
    assert json.loads(Path("runs/x/summary.json").read_text())["status"] == "finished"


def test_a_gradient_that_is_not_a_number_is_shown(script_folder):
    class Diverging(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.global_step >= 10 else loss

    logged = fit(Diverging())
    for tag in ("train/loss", "weights/gradient_norm"):
        assert [math.isnan(value) for value in logged[tag].values()] == [False, False, *[True] * 5], tag


def test_trials_of_a_finder_are_not_measured(script_folder, whole):
    class FindLater(LearningRateFinder):
        def on_fit_start(self, *arguments):
            pass

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)

    net = Net()
    net.lr = 0.01
    logged = fit(net, callbacks=[FindLater(num_training_steps=20, update_attr=False)])
    assert logged["train/loss"] == pytest.approx(whole[1]["train/loss"], rel=1e-6)


@pytest.mark.parametrize("profiler", [None, "simple"])  # with a profiler, Lightning's own loop trains
def test_a_batch_of_none_counts_as_a_step(script_folder, profiler):
    class WithoutThird(Net):
        def train_dataloader(self):
            def collate(items):
                return None if items[0] == 3 else (torch.ones(1, 3), torch.ones(1, 1))

            return DataLoader(range(8), batch_size=1, collate_fn=collate)

    assert list(fit(WithoutThird(), epochs=1, log_every_n_steps=2, profiler=profiler)["train/loss"]) == [1, 3, 5, 7]


def test_a_checkpoint_of_the_last_hook_of_an_interval_does_not_count_it_twice(script_folder, whole):
    saved = ModelCheckpoint(script_folder / "saved", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    fit(Net(), name="first", max_steps=15, callbacks=[saved])
    second = fit(Net(), name="second", ckpt_path=script_folder / "saved/step=15.ckpt")["train/loss"]
    expected = {step: loss for step, loss in whole[1]["train/loss"].items() if step >= 15}
    assert second == pytest.approx(expected, rel=1e-6)


def optimizer_with(*rates):
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def test_each_parameter_group_has_its_own_series():
    one, two = {"train/lr": 0.5}, {"train/lr": 0.5, "train/lr-1": 0.25}
    assert learning_rates([]) == {} and learning_rates([optimizer_with(0.5)]) == one
    assert learning_rates([optimizer_with(0.5, torch.tensor(0.25))]) == two
    assert learning_rates([optimizer_with(0.5), optimizer_with(0.25)]) == two


class Scheduled(BoringModel):
    """The learning rate of the n-th step, from 0, is 0.5 to the power of n."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, (1, 3, 5)),
        ({"profiler": "simple"}, (1, 3, 5)),  # with a profiler, Lightning's own loop trains
        ({"accumulate_grad_batches": 3, "log_every_n_steps": 1}, (0, 1)),
    ],
)
def test_the_rate_is_that_of_the_step_at_which_it_is_logged(script_folder, settings, steps):
    settings = {"log_every_n_steps": 2, **settings}
    logged = fit(Scheduled(), epochs=1, limit_train_batches=6, **settings)
    assert logged["train/lr"] == {step: 0.5**step for step in steps}


class TwoOptimizers(BoringModel):
    """Takes a step of both optimizers per batch, in 20 ms."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.now = False, time.monotonic()

    def train_dataloader(self):
        torch.manual_seed(0)  # the same data in each attempt
        return super().train_dataloader()

    def training_step(self, batch, batch_idx):
        self.now += 0.02
        for optimizer in self.optimizers():
            loss = self.step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.2, 0.1)]


def test_series_of_two_optimizers_have_the_same_steps_and_one_time_of_both(detailed, script_folder, monkeypatch):
    for settings in ({"max_steps": 6}, {}):  # three batches, then all
        model = TwoOptimizers()
        monkeypatch.setattr(activity, "monotonic", lambda model=model: model.now)
        logged = fit(model, epochs=1, limit_train_batches=6, log_every_n_steps=1, **settings)
    for tag, value in {"train/lr": 0.2, "train/lr-1": 0.1, "wall_time/step_ms": 20}.items():
        assert logged[tag] == pytest.approx(dict.fromkeys(range(6), value)), tag
    assert list(logged["loss"]) == list(logged["weights/gradient_norm"]) == list(range(6))


class LogsAtTheEnds(Net):
    def on_train_epoch_end(self):
        self.log("end", 1.0)

    def test_step(self, batch, batch_idx):
        self.log("test", 1.0)


def test_rows_after_the_last_step_of_an_epoch_state_its_end_and_stay_when_training_continues(script_folder):
    module, trainer = LogsAtTheEnds(), Trainer(max_epochs=2, name="x", log_every_n_steps=INTERVAL, **QUIET)
    trainer.fit(module)
    trainer.test(module, module.train_dataloader(), verbose=False)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 4, 40  # ends in the fourth epoch, of 12 steps
    trainer.fit(module)
    rows = list(read_rows(Path("runs/x")))
    assert [(row.epoch, row.samples) for row in rows if "test" in row.values] == [(2, 2 * SAMPLES)]
    ends = [(row.epoch, row.samples) for row in rows if "end" in row.values]
    expected = [(1, SAMPLES), (2, 2 * SAMPLES), (3, 3 * SAMPLES), (3 + 4 / 12, 3 * SAMPLES + 4 * BATCH)]
    assert ends == [(pytest.approx(epoch), samples) for epoch, samples in expected]
    epochs = [row.epoch for row in rows]
    assert epochs == sorted(epochs)
