import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.saved_state.optimizer_overrides import OptimizerOverrides
from rankzero.training.strategies import OneProcess
from running import train_in_process


class Model(BoringModel):
    def __init__(self, schedule, **settings):
        super().__init__()
        self.schedule, self.settings = schedule, settings

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **{"lr": 0.1, "momentum": 0.9, **self.settings})
        schedules = {
            "none": None,
            "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        }
        schedule = self.schedule if callable(self.schedule) else schedules[self.schedule]
        if callable(self.schedule):
            return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}
        return {"optimizer": optimizer, **({"lr_scheduler": schedule()} if schedule else {})}


def train_and_get_group(tmp_path, schedule, epochs, resume=None, **settings):
    model = Model(schedule, **settings)
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}
    file = tmp_path / f"{epochs}.ckpt"

    class Save(OptimizerOverrides):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(file)

    strategy = OneProcess(SamplingPlan(), device="cpu")
    train_in_process(Save(), model=model, loops=True, max_epochs=epochs, resume=resume, strategy=strategy, **limits)
    return model.trainer.optimizers[0].param_groups[0], file


@pytest.mark.parametrize("schedule", ["none", "step", "cosine", "lambda"])
def test_changed_setting_is_used_and_the_schedule_continues_in_proportion(tmp_path, schedule):
    uninterrupted, _ = train_and_get_group(tmp_path, schedule, 5)
    _, file = train_and_get_group(tmp_path, schedule, 2)
    resumed, _ = train_and_get_group(tmp_path, schedule, 5, resume=file)
    assert resumed["lr"] == pytest.approx(uninterrupted["lr"], rel=1e-12)
    halved, _ = train_and_get_group(tmp_path, schedule, 5, resume=file, lr=0.05, momentum=0.5)
    assert halved["momentum"] == 0.5 and resumed["momentum"] == 0.9
    assert halved["lr"] == pytest.approx(uninterrupted["lr"] / 2, rel=1e-12)


class Warmup:
    """Schedule function that stores its settings as attributes."""

    def __init__(self, steps):
        self.steps, self.maximum = steps, torch.ones(())  # a plain value and a tensor

    def __call__(self, epoch):
        return min(float(self.maximum), (epoch + 1) / self.steps)


def sequential(optimizer, first, decay):
    parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup(first)), StepLR(optimizer, 1, gamma=decay)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


StepLR = torch.optim.lr_scheduler.StepLR
NESTED = {
    "phases": (
        lambda steps: lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
        (4, 8),
    ),
    "milestones": (
        lambda milestone: lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [milestone]),
        (3, 5),
    ),
    "an object": (lambda steps: lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup(steps)), (3, 9)),
    "an object within": (
        lambda steps: (
            lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, 2, scale_fn=Warmup(steps))
        ),
        (3, 9),
    ),
    "within another": (lambda decay: lambda optimizer: sequential(optimizer, 2, decay), (0.5, 0.1)),
}


@pytest.mark.parametrize("kind", NESTED)
def test_changed_settings_nested_in_a_schedule_are_used(tmp_path, kind):
    schedule, (before, after) = NESTED[kind]
    configured_from_start, _ = train_and_get_group(tmp_path, schedule(after), 5)
    _, file = train_and_get_group(tmp_path, schedule(before), 2)
    changed, _ = train_and_get_group(tmp_path, schedule(after), 5, resume=file)
    assert changed["lr"] == pytest.approx(configured_from_start["lr"], rel=1e-12)
    kept, _ = train_and_get_group(tmp_path, schedule(before), 4, resume=file)
    assert kept["lr"] == pytest.approx(train_and_get_group(tmp_path, schedule(before), 4)[0]["lr"], rel=1e-12)
    state = torch.load(file, weights_only=True)
    assert state["configured"]["schedules"]
