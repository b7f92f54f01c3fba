"""Where training would wait for a GPU: counted on a pretended one."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from pretended_cuda import pretended_cuda
from torch.nn import functional as F

import rankzero
from data_modules import Digits, Toy
from lightning_modules import MLP
from rankzero.sampling.plan import SamplingPlan
from rankzero.training import lightning_inside
from rankzero.training.hooks import LoopCallback
from rankzero.training.metrics.epoch_averages import LoggerConnector
from stock import Curves

STEPS = 40


class Own(LightningModule):
    """A user's module, which logs a tensor and a number in each step."""

    def __init__(self, on_epoch=True, optimizer=torch.optim.SGD):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)
        self.on_epoch, self.optimizer = on_epoch, optimizer

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=self.on_epoch, prog_bar=True)
        self.log("beta", 0.5)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class Counter(LoopCallback):
    """Counts the waits for a device between two hooks, and what else a subclass counts or records."""

    def __init__(self, device):
        self.device, self.count, self.batches = device, 0, []


class CountSteps(Counter):
    """Counts the waits of the steps from the 21st to the 60th; the interval of logging steps is ten."""

    def on_safe_point(self, trainer):
        if trainer.global_step == 20:
            self.device.count_from_here()
        elif trainer.global_step == 20 + STEPS:
            self.device.is_counting = False


class CountValidation(Counter):
    """Counts the waits of a validation, from its first hook to its last, and its batches."""

    def on_validation_start(self, trainer, pl_module):
        self.device.count_from_here()

    def on_validation_batch_end(self, *arguments):
        self.count += 1

    def on_validation_end(self, trainer, pl_module):
        self.device.is_counting = False


class CountSave(Counter):
    """Counts the waits between the 45th and the 46th step, where a checkpoint is saved, and all saves."""

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == 45:
            self.device.count_from_here()

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.count += 1

    def on_train_batch_start(self, *arguments):
        self.device.is_counting = False


def fit(root, callback, model, data, **settings):
    """Trains an epoch on a pretended GPU; returns the waits that the callback has counted, and the callback."""
    with pretended_cuda() as device:
        counter = callback(device)
        settings = {"limit_val_batches": 0, "max_epochs": 1, "callbacks": [counter], **settings}
        trainer = rankzero.Trainer(
            name="x", root=root, accelerator="gpu", devices=1, log_every_n_steps=10, num_sanity_val_steps=0,
            preflight="off", quiet=True, **settings,
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        return device, counter


@pytest.mark.parametrize(
    ("make_model", "settings"),
    [
        (lambda: MLP(in_features=20, out_features=1), {}),
        (Own, {}),
        (lambda: Own(on_epoch=False, optimizer=torch.optim.AdamW), {"gradient_clip_val": 1.0}),
        (Own, {"accumulate_grad_batches": 2}),
        (Own, {"precision": "bf16-mixed"}),
    ],
    ids=["included", "own", "clipping", "accumulation", "bf16"],
)
def test_no_step_waits_for_the_gpu(script_folder, make_model, settings):
    device, _ = fit(script_folder, CountSteps, make_model(), Toy(count=6400, batch_size=32), **settings)
    assert device.launches > STEPS
    assert dict(device.places) == {}


@pytest.mark.parametrize(
    ("make_model", "make_data"),
    [
        (lambda: MLP(in_features=64, num_classes=10), lambda: Digits(batch_size=20)),
        (lambda: MLP(in_features=20, out_features=1), lambda: Toy(count=3200, batch_size=32)),
    ],
    ids=["classification", "regression"],
)
def test_a_drawn_validation_waits_once_when_its_metrics_are_read(script_folder, make_model, make_data):
    device, counter = fit(script_folder, CountValidation, make_model(), make_data(), limit_val_batches=1.0)
    assert counter.count > 8
    assert dict(device.waits) == {"event": 1}, device.places
    assert list((script_folder / "x").rglob("*.png"))


class Batches(CountSteps):
    """Counts waits too, and records the training batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append([tensor.clone() for tensor in batch])


@pytest.mark.parametrize("place", ["auto", "cpu"])
def test_batches_reach_the_gpu_without_waits_or_lightnings_transfer_and_equal_those_of_the_cpu(
    script_folder, monkeypatch, place
):
    is_plain, found = lightning_inside.is_plain, []
    monkeypatch.setattr(lightning_inside, "is_plain", lambda *batch: found.append(is_plain(*batch)) or found[-1])
    data = Digits(batch_size=16, device=place)
    device, counter = fit(script_folder, Batches, MLP(in_features=64, num_classes=10), data, seed=3)
    assert found == [True] * 90 and dict(device.places) == {}
    expected = SamplingPlan(seed=3).wrap(data.train_dataloader(), training=True)
    torch.testing.assert_close(counter.batches, [[*batch] for batch in expected], rtol=0, atol=0)


def test_a_save_between_logging_steps_reads_the_loss_and_the_metrics(script_folder):
    model, data = MLP(in_features=20, out_features=1), Toy(count=3200, batch_size=32)
    device, counter = fit(script_folder, CountSave, model, data, save_every="45steps")
    assert counter.count == 3
    assert dict(device.waits) == {"__float__": 2}, device.places  # the first empties the queue


def test_a_row_that_arrives_after_its_step_reaches_the_loggers_of_its_step():
    """A finder replaces the loggers during its trials."""
    loggers = Curves(), Curves()
    with pretended_cuda():
        trainer = Trainer(logger=loggers[0], enable_checkpointing=False)
        connector = LoggerConnector(trainer)
        connector._first_loop_iter = False
        connector.log_metrics({"loss": torch.full((), 2.0, device="cuda")})
        trainer.loggers = [loggers[1]]
        assert not loggers[0].lines
        connector.deliver_row()
    assert [logger.lines for logger in loggers] == [[(0, {"loss": 2.0, "epoch": 0})], []]


def test_a_fast_run_on_a_gpu_selects_tf32_and_measures_kernels(script_folder, monkeypatch):
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    with pretended_cuda():
        rankzero.Trainer(name="x", root=script_folder, accelerator="gpu", devices=1, fast="yes")
    assert precisions == ["high"] and torch.backends.cudnn.benchmark
