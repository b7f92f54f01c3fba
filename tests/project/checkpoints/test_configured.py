import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from project.checkpoints.configured import ConfiguredSettings
from running import train_here


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
        schedule = schedules[self.schedule]
        return {"optimizer": optimizer, **({"lr_scheduler": schedule()} if schedule else {})}


def group(tmp_path, schedule, epochs, resume=None, **settings):
    model = Model(schedule, **settings)
    limits = {"limit_train_batches": 2, "limit_val_batches": 0}
    file = tmp_path / f"{epochs}.ckpt"

    class Save(ConfiguredSettings):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(file)

    train_here(Save(), model=model, loops=True, max_epochs=epochs, resume=resume, **limits)
    return model.trainer.optimizers[0].param_groups[0], file


@pytest.mark.parametrize("schedule", ["none", "step", "cosine", "lambda"])
def test_a_changed_setting_wins_and_the_schedule_goes_on_in_proportion(tmp_path, schedule):
    whole, _ = group(tmp_path, schedule, 5)
    _, file = group(tmp_path, schedule, 2)
    same, _ = group(tmp_path, schedule, 5, resume=file)
    assert same["lr"] == pytest.approx(whole["lr"], rel=1e-12)
    halved, _ = group(tmp_path, schedule, 5, resume=file, lr=0.05, momentum=0.5)
    assert halved["momentum"] == 0.5 and same["momentum"] == 0.9
    assert halved["lr"] == pytest.approx(whole["lr"] / 2, rel=1e-12)
