import math

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_modules.schedule import Constant, Cosine
from lightning_modules.supervised import Supervised, required
from running import restore_process_state
from stock import SILENT

SAMPLES, FEATURES, CLASSES = 10, 4, 3


def data(classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    if classes is None:
        return inputs, torch.randn(SAMPLES, 1, generator=generator)
    return inputs, torch.randint(classes, (SAMPLES,), generator=generator)


def module(classes=CLASSES, **options):
    torch.manual_seed(1)
    return Supervised(nn.Linear(FEATURES, classes or 1), num_classes=classes, **options)


@pytest.fixture
def make_trainer():
    """Yields a function that creates stock Trainers without logger, checkpoints and progress bar."""

    def make(**settings):
        return Trainer(num_sanity_val_steps=0, **SILENT, **settings)

    with restore_process_state():
        yield make


def loader(tensors, batch_size=4):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


LOSSES = {CLASSES: F.cross_entropy, None: F.mse_loss}


@pytest.mark.parametrize("classes", LOSSES)
def test_the_loss_is_cross_entropy_with_classes_and_squared_error_without(classes):
    model, (inputs, targets) = module(classes), data(classes)
    assert torch.equal(model.loss(model(inputs), targets), LOSSES[classes](model.network(inputs), targets))


@pytest.mark.parametrize("classes", [-1, 0, 1])
def test_fewer_than_two_classes_are_refused(classes):
    with pytest.raises(ValueError, match=f"^num_classes is {classes}; a classifier needs 2 or more$"):
        Supervised(nn.Linear(1, 1), num_classes=classes)


@pytest.mark.parametrize("classes", LOSSES)
def test_training_equals_a_hand_written_loop_bit_for_bit(make_trainer, classes):
    tensors, epochs = data(classes), 2
    model, expected = module(classes), module(classes).network
    make_trainer(max_epochs=epochs).fit(model, loader(tensors))

    optimizer = SGD(expected.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    total = epochs * math.ceil(SAMPLES / 4)
    for step, batch in enumerate([*loader(tensors)] * epochs):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / total)) / 2
        optimizer.zero_grad()
        LOSSES[classes](expected(batch[0]), batch[1]).backward()
        optimizer.step()
    for parameter, expected_parameter in zip(model.network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)


def test_the_training_loss_is_logged_in_each_step(make_trainer):
    losses = []

    class RecordLosses(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append((outputs["loss"].item(), trainer.callback_metrics["train/loss"].item()))

    make_trainer(max_epochs=1, callbacks=[RecordLosses()]).fit(module(), loader(data()))
    assert len(losses) == 3 and all(loss == logged for loss, logged in losses)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


@pytest.mark.parametrize("batch_size", [1, 3, SAMPLES, 100])
@pytest.mark.parametrize(
    ("function", "split", "classes", "name", "metric"),
    [
        ("validate", "val", CLASSES, "accuracy", accuracy),
        ("test", "test", CLASSES, "accuracy", accuracy),
        ("validate", "val", None, "mae", F.l1_loss),
    ],
)
def test_metrics_do_not_depend_on_the_batch_size(make_trainer, function, split, classes, name, metric, batch_size):
    model, (inputs, targets) = module(classes), data(classes)
    (found,) = getattr(make_trainer(), function)(model, loader((inputs, targets), batch_size), verbose=False)
    with torch.no_grad():
        outputs = model.network(inputs)
    assert found == {
        f"{split}/loss": pytest.approx(LOSSES[classes](outputs, targets).item(), rel=1e-6),
        f"{split}/{name}": pytest.approx(metric(outputs, targets).item(), rel=1e-6),
    }


def test_a_nan_loss_makes_the_mean_loss_nan(make_trainer):
    inputs, targets = data()
    inputs[5] = float("nan")
    (found,) = make_trainer().validate(module(), loader((inputs, targets), 2), verbose=False)
    assert math.isnan(found["val/loss"])


def test_validation_metrics_restart_in_each_epoch(make_trainer):
    model = module(optimizer=lambda parameters: SGD(parameters, lr=0.0))
    logged_losses = []

    class RecordLoss(Callback):
        def on_validation_end(self, trainer, pl_module):
            logged_losses.append(trainer.callback_metrics["val/loss"].item())

    class GrowingLoader(DataLoader):
        """Loader that yields half of the samples in the first validation, and all samples later."""

        def __iter__(self):
            return iter([*super().__iter__()][: 1 if not logged_losses else None])

    make_trainer(max_epochs=2, callbacks=[RecordLoss()]).fit(
        model, loader(data()), GrowingLoader(TensorDataset(*data()), batch_size=5)
    )
    inputs, targets = data()
    with torch.no_grad():
        losses = F.cross_entropy(model.network(inputs), targets, reduction="none")
    assert logged_losses == pytest.approx([losses[:5].mean().item(), losses.mean().item()], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 2}, 6),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 4),
        ({"max_steps": 5}, 5),
        ({"max_epochs": 4, "max_steps": 5}, 5),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2),
    ],
)
def test_an_included_schedule_is_planned_for_the_steps_of_the_run(make_trainer, settings, steps):
    trainer = make_trainer(**settings)
    trainer.fit(module(schedule=lambda optimizer: Cosine(optimizer, final_factor=0.5)), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert config.interval == "step" and config.scheduler.total_steps == trainer.global_step == steps
    assert config.scheduler.get_last_lr() == [pytest.approx(0.025)]


def test_the_schedule_of_an_endless_run_has_no_plan(make_trainer):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *arguments):
            trainer.should_stop = True

    trainer = make_trainer(max_epochs=-1, callbacks=[Stop()])
    trainer.fit(module(), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.total_steps is None and config.scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize(
    ("schedule", "interval", "monitor"),
    [
        (Constant, "step", None),
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), "epoch", None),
        (lambda optimizer: ReduceLROnPlateau(optimizer, monitor="val/loss"), "epoch", "val/loss"),
    ],
    ids=["ours", "StepLR", "ReduceLROnPlateau"],
)
def test_interval_and_monitor_depend_on_the_schedule(make_trainer, schedule, interval, monitor):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module(schedule=schedule), loader(data()), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert (config.interval, config.monitor) == (interval, monitor)


def test_the_optimizer_gets_every_parameter(make_trainer):
    model = module(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.5), schedule=Constant)
    model.trainer = make_trainer(max_steps=7)
    optimizer = model.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["lr"] == 0.5
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == {
        id(parameter) for parameter in model.network.parameters()
    }


def test_a_required_number_is_one_or_more_and_the_error_states_what_to_type():
    assert [required("width", value, "Net", "columns") for value in (1, 100)] == [1, 100]
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"^Net: width is {value}; it must be 1 or more$"):
            required("width", value, "Net", "columns")
    with pytest.raises(ValueError) as error:
        required("width", None, "Net", "columns of a sample")
    assert str(error.value) == (
        "Net needs width (columns of a sample), and the data module has no such attribute. Type another --model or "
        "--data, or --model.width N, or give the data module an attribute width"
    )


@pytest.mark.parametrize(("classes", "name"), [(CLASSES, "logits"), (None, "predictions")])
def test_predict_and_validation_return_the_networks_outputs(make_trainer, classes, name):
    returned = []

    class Record(Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, *arguments):
            returned.append(outputs)

    model, tensors = module(classes), data(classes)
    make_trainer(max_epochs=1, callbacks=[Record()]).validate(model, loader(tensors), verbose=False)
    expected = torch.cat([model.network(batch) for batch in tensors[0].split(4)])
    assert torch.equal(torch.cat([outputs[name] for outputs in returned]), expected)
    assert torch.equal(torch.cat([outputs["targets"] for outputs in returned]), tensors[1])
    assert torch.equal(torch.cat(make_trainer().predict(model, loader(tensors))), expected)
