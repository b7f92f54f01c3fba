from datetime import timedelta
from pathlib import Path

import pytest
import torch
from boring_models import DropoutNet, samples
from lightning.pytorch.strategies import DDPStrategy

from rankzero import Trainer
from rankzero.messages import RequestError
from rankzero.runs.checkpoints.manifest import checkpoints_in
from stock import QUIET


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_every": "often"}, 'save_every="often"'),
        ({"keep": 0}, "keep=0"),
        ({"time_limit": "soon"}, 'time_limit="soon"'),
        ({"name": "../x"}, 'name="../x"'),
        ({"accept_changed": ["data", "weather"]}, "data,weather"),
        ({"launcher": "torchrum"}, 'launcher="torchrun"'),
        ({"batch_size": 4, "global_batch_size": 8}, "batch_size=4 and global_batch_size=8"),
        ({"strategy": "fsdp"}, 'strategy="fsdp"'),
        ({"accelerator": "gpu"}, 'accelerator="gpu"'),
        ({"devices": 100_000}, "devices=100000"),
        ({"num_nodes": 2}, "num_nodes=2"),
    ],
)
def test_the_refusal_of_a_wrong_argument_names_the_argument(script_folder, monkeypatch, settings, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RequestError) as error:
        Trainer(**{**QUIET, **settings})
    assert message in str(error.value)
    assert not (script_folder / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"time_limit": timedelta(hours=1), "save_every": 2, "keep": 1, "trust_checkpoint": True},
        {"time_limit": "2h", "accept_changed": "data", "fast": True, "start_timeout": 10.0},
        {"strategy": DDPStrategy(find_unused_parameters=True)},
        {"barebones": True, "enable_progress_bar": False},
        {"fast_dev_run": True},
        {"logger": False},
        {"enable_checkpointing": False},
        {"root": Path("elsewhere")},
        {"seed": 3, "global_batch_size": 8},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_arguments_are_accepted_in_every_form(script_folder, settings):
    trainer = Trainer(**{**QUIET, "max_epochs": 1, "name": "x", **settings})
    trainer.fit(DropoutNet(), samples(), samples())
    assert trainer.global_step == (1 if "fast_dev_run" in settings else 3 if "seed" in settings else 6)
    saved = checkpoints_in(Path(settings.get("root", "runs")) / "x/checkpoints")
    assert bool(saved) is not bool({"barebones", "fast_dev_run", "enable_checkpointing"} & settings.keys())


def test_lightnings_environment_variables_set_defaults(script_folder, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "1")
    assert Trainer(**QUIET).max_epochs == 1 and Trainer(max_epochs=2, **QUIET).max_epochs == 2
