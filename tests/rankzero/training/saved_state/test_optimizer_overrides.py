import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim import lr_scheduler as schedules

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.saved_state.optimizer_overrides import OptimizerOverrides
from rankzero.training.strategies import OneProcess
from running import train_in_process
from stock import saves_to


class Model(BoringModel):
    def __init__(self, make_schedule, **settings):
        super().__init__()
        self.make_schedule, self.settings = make_schedule, settings

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **{"lr": 0.1, "momentum": 0.9, **self.settings})
        return [optimizer], [self.make_schedule(optimizer)] if self.make_schedule else []


def train_and_get_group(tmp_path, schedule, epochs, resume=None, **settings):
    model, file = Model(schedule, **settings), tmp_path / f"{epochs}.ckpt"
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}
    limits |= {"max_epochs": epochs, "strategy": OneProcess(SamplingPlan(), device="cpu")}
    train_in_process(OptimizerOverrides(), saves_to(file), model=model, loops=True, resume=resume, **limits)
    return model.trainer.optimizers[0].param_groups[0], file


SCHEDULES = {
    "none": None,
    "step": lambda optimizer: schedules.StepLR(optimizer, step_size=2, gamma=0.5),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=10),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_changed_setting_is_used_and_the_schedule_continues_in_proportion(tmp_path, schedule):
    make_schedule = SCHEDULES[schedule]
    uninterrupted, _ = train_and_get_group(tmp_path, make_schedule, 5)
    _, file = train_and_get_group(tmp_path, make_schedule, 2)
    resumed, _ = train_and_get_group(tmp_path, make_schedule, 5, resume=file)
    assert resumed["lr"] == pytest.approx(uninterrupted["lr"], rel=1e-12)
    halved, _ = train_and_get_group(tmp_path, make_schedule, 5, resume=file, lr=0.05, momentum=0.5)
    assert halved["momentum"] == 0.5 and resumed["momentum"] == 0.9
    assert halved["lr"] == pytest.approx(uninterrupted["lr"] / 2, rel=1e-12)


class Warmup:
    def __init__(self, steps):
        self.steps, self.maximum = steps, torch.ones(())  # a plain value and a tensor

    def __call__(self, epoch):
        return min(float(self.maximum), (epoch + 1) / self.steps)


def sequential(optimizer, decay):
    parts = [schedules.LambdaLR(optimizer, Warmup(2)), schedules.StepLR(optimizer, 1, gamma=decay)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


NESTED = {
    "phases": (lambda optimizer, steps: schedules.OneCycleLR(optimizer, 0.1, total_steps=steps), 4, 8),
    "milestones": (lambda optimizer, milestone: schedules.MultiStepLR(optimizer, [milestone]), 3, 9),
    "an object": (lambda optimizer, steps: schedules.LambdaLR(optimizer, Warmup(steps)), 3, 9),
    "an object within": (lambda optimizer, n: schedules.CyclicLR(optimizer, 0.1, 0.2, 2, scale_fn=Warmup(n)), 3, 9),
    "within another": (sequential, 0.5, 0.1),
}
"""Schedule with one setting, and the setting before and after a change."""


@pytest.mark.parametrize("kind", NESTED)
def test_changed_settings_nested_in_a_schedule_are_used(tmp_path, kind):
    schedule, old, new = NESTED[kind]
    before, after = (lambda optimizer: schedule(optimizer, old)), (lambda optimizer: schedule(optimizer, new))
    _, file = train_and_get_group(tmp_path, before, 2)
    for make_schedule, epochs in ((after, 5), (before, 4)):
        uninterrupted, _ = train_and_get_group(tmp_path, make_schedule, epochs)
        resumed, _ = train_and_get_group(tmp_path, make_schedule, epochs, resume=file)
        assert resumed["lr"] == pytest.approx(uninterrupted["lr"], rel=1e-12)
    assert torch.load(file, weights_only=True)["configured"]["schedules"]
