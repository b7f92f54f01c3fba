import math
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_modules.mlp import MLP
from lightning_modules.supervised import Constant, Cosine, OneCycle, Schedule, Supervised, required
from running import restore_process_state
from stock import SILENT

KINDS = (Constant, Cosine, OneCycle)


def sgd(lr=2.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def rates(make_schedule, steps):
    optimizer = sgd()
    schedule = make_schedule(optimizer)
    if isinstance(schedule, Schedule):
        schedule.plan(steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_constant_rate_is_kept_and_cosine_equals_torchs_annealing_after_a_linear_warmup():
    assert rates(Constant, 5) == [2.0] * 5
    found = rates(Cosine, 20)
    assert found == pytest.approx(rates(lambda optimizer: CosineAnnealingLR(optimizer, T_max=20), 20))
    assert found[10] == pytest.approx(1.0)
    assert rates(lambda optimizer: Cosine(optimizer, final_factor=0.1), 1000)[-1] == pytest.approx(0.2, rel=1e-3)
    for kind in (partial(Constant, warmup_steps=4), partial(Cosine, warmup_steps=4)):
        assert rates(kind, 20)[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


def test_one_cycle_rises_for_30_percent_of_the_steps_and_then_falls():
    found = rates(OneCycle, 100)
    assert found[0] == pytest.approx(2.0 * 0.04) and max(found) == pytest.approx(2.0) and found[-1] < 0.01
    top = found.index(max(found))
    assert top == 30 and found[:31] == sorted(found[:31]) and found[30:] == sorted(found[30:], reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planned_schedule_returns_the_optimizers_rate_and_a_restored_one_continues_with_the_new_plan(kind):
    first, second = kind(sgd()), kind(sgd())
    first.plan(10)
    assert first.get_last_lr() == [first.optimizer.param_groups[0]["lr"]]
    for _ in range(5):
        first.optimizer.step()
        first.step()
    second.plan(20)
    second.load_state_dict(first.state_dict())
    assert (second.last_epoch, second.total_steps) == (5, 20)


def test_an_invalid_warmup_or_a_schedule_without_a_factor_is_refused():
    class Empty(Schedule): ...

    for refused, error, message in (
        (lambda: Constant(sgd(), warmup_steps=-1), ValueError, "must be"),
        (lambda: OneCycle(sgd(), warmup_fraction=1.0), ValueError, "must be"),
        (lambda: Empty(sgd()), TypeError, "abstract class Empty .*factor"),
    ):
        with pytest.raises(error, match=message):
            refused()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.3, torch.tensor(0.3)])
def test_a_step_equals_torchs_step(kind, rate):
    states = []
    for step in (kind.step, LRScheduler.step):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=rate.clone() if isinstance(rate, torch.Tensor) else rate)
        schedule = kind(optimizer)
        schedule.plan(10)
        for _ in range(7):
            optimizer.step()
            step(schedule)
        rates_of = [group["lr"] for group in optimizer.param_groups], schedule.get_last_lr()
        states.append((*([*map(float, each)] for each in rates_of), schedule.last_epoch, schedule._step_count))
        assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
    assert states[0] == states[1]


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
    """Returns a function that creates stock Trainers without logger, checkpoints and progress bar."""
    with restore_process_state():
        yield partial(Trainer, num_sanity_val_steps=0, **SILENT)


def loader(tensors, batch_size=4):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


LOSSES = {CLASSES: F.cross_entropy, None: F.mse_loss}


class Record(Callback):
    """Appends the result of a function of the Trainer and the outputs of a batch, or of a validation, to a list."""

    def __init__(self, hook, observe):
        self.seen = []
        setattr(self, hook, lambda trainer, module, outputs=None, *_: self.seen.append(observe(trainer, outputs)))


def logged_loss(trainer, split="train"):
    return trainer.callback_metrics[f"{split}/loss"].item()


@pytest.mark.parametrize("classes", LOSSES)
def test_training_equals_a_hand_written_loop_bit_for_bit_and_logs_the_loss_of_each_step(make_trainer, classes):
    """The loss is cross entropy with classes and squared error without."""
    tensors, epochs = data(classes), 2
    model, expected = module(classes), module(classes).network
    assert torch.equal(model.loss(model(tensors[0]), tensors[1]), LOSSES[classes](expected(tensors[0]), tensors[1]))
    losses = Record("on_train_batch_end", lambda trainer, outputs: [outputs["loss"].item(), logged_loss(trainer)])
    make_trainer(max_epochs=epochs, callbacks=[losses]).fit(model, loader(tensors))

    optimizer = SGD(expected.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    total = epochs * math.ceil(SAMPLES / 4)
    for step, batch in enumerate([*loader(tensors)] * epochs):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / total)) / 2
        optimizer.zero_grad()
        loss = LOSSES[classes](expected(batch[0]), batch[1])
        assert losses.seen[step] == [loss.item()] * 2
        loss.backward()
        optimizer.step()
    assert len(losses.seen) == total
    for parameter, expected_parameter in zip(model.network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)


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
    losses = Record("on_validation_end", lambda trainer, _: logged_loss(trainer, "val"))

    class GrowingLoader(DataLoader):
        """Loader that yields half of the samples in the first validation, and all samples later."""

        def __iter__(self):
            return iter([*super().__iter__()][: 1 if not losses.seen else None])

    (inputs, targets), trainer = data(), make_trainer(max_epochs=2, callbacks=[losses])
    trainer.fit(model, loader(data()), GrowingLoader(TensorDataset(inputs, targets), batch_size=5))
    with torch.no_grad():
        expected = F.cross_entropy(model.network(inputs), targets, reduction="none")
    assert losses.seen == pytest.approx([expected[:5].mean().item(), expected.mean().item()], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        *(({"max_epochs": 2}, 6), ({"max_steps": 5}, 5), ({"max_epochs": 4, "max_steps": 5}, 5)),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 4),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2),
    ],
)
def test_an_included_schedule_is_planned_for_the_steps_of_the_run(make_trainer, settings, steps):
    trainer = make_trainer(**settings)
    trainer.fit(module(schedule=lambda optimizer: Cosine(optimizer, final_factor=0.5)), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert (config.interval, config.monitor) == ("step", None)
    assert config.scheduler.total_steps == trainer.global_step == steps
    assert config.scheduler.get_last_lr() == [pytest.approx(0.025)]


def test_the_schedule_of_an_endless_run_has_no_plan(make_trainer):
    stop = Record("on_train_batch_end", lambda trainer, _: setattr(trainer, "should_stop", True))
    trainer = make_trainer(max_epochs=-1, callbacks=[stop])
    trainer.fit(module(), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.total_steps is None and config.scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize(
    ("schedule", "interval", "monitor"),
    [
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), "epoch", None),
        (lambda optimizer: ReduceLROnPlateau(optimizer, monitor="val/loss"), "epoch", "val/loss"),
    ],
    ids=["StepLR", "ReduceLROnPlateau"],
)
def test_a_schedule_of_torch_or_lightning_is_stepped_by_epochs(make_trainer, schedule, interval, monitor):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module(schedule=schedule), loader(data()), loader(data()))
    (config,) = trainer.lr_scheduler_configs
    assert (config.interval, config.monitor) == (interval, monitor)


def test_fewer_than_two_classes_and_a_required_number_below_one_are_refused_with_what_to_type():
    for classes in (-1, 0, 1):
        with pytest.raises(ValueError, match=f"^num_classes is {classes}; a classifier needs 2 or more$"):
            Supervised(nn.Linear(1, 1), num_classes=classes)
    assert [required("width", value, "Net", "columns") for value in (1, 100)] == [1, 100]
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"^Net: width is {value}; it must be 1 or more$"):
            required("width", value, "Net", "columns")
    with pytest.raises(ValueError, match=r"^Net needs width \(columns of a sample\), and the data module has no such"):
        required("width", None, "Net", "columns of a sample")


@pytest.mark.parametrize(("classes", "name"), [(CLASSES, "logits"), (None, "predictions")])
def test_predict_and_validation_return_the_networks_outputs(make_trainer, classes, name):
    model, tensors = module(classes), data(classes)
    returned = Record("on_validation_batch_end", lambda _, outputs: (outputs[name], outputs["targets"]))
    make_trainer(max_epochs=1, callbacks=[returned]).validate(model, loader(tensors), verbose=False)
    expected = torch.cat([model.network(batch) for batch in tensors[0].split(4)])
    outputs, targets = map(torch.cat, zip(*returned.seen, strict=True))
    assert torch.equal(outputs, expected) and torch.equal(targets, tensors[1])
    assert torch.equal(torch.cat(make_trainer().predict(model, loader(tensors))), expected)


@pytest.mark.parametrize(
    ("device", "make", "expected"),
    [
        ("cpu", SGD, None),
        *(("cuda", kind, True) for kind in (SGD, torch.optim.Adam, torch.optim.AdamW)),
        ("cuda", partial(SGD, fused=False), False),
        ("cuda", partial(SGD, foreach=True), None),
        ("cuda", torch.optim.Adagrad, None),
    ],
)
def test_optimizers_are_fused_on_a_gpu_unless_the_user_decides(monkeypatch, device, make, expected):
    schedule = partial(CosineAnnealingLR, T_max=2)
    model = MLP(in_features=2, out_features=1, optimizer=partial(make, lr=0.1), schedule=schedule)
    monkeypatch.setattr(MLP, "device", torch.device(device))
    optimizer = model.configure_optimizers()["optimizer"]
    assert optimizer.param_groups[0]["fused"] is expected
    assert not hasattr(optimizer, "_step_supports_amp_scaling")  # Lightning would not clip gradients
