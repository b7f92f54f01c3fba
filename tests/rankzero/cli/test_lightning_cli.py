"""Configurations: available settings, classes of the user, and messages about bad input."""

import os

import pytest
import yaml
from lightning_utilities.core.imports import RequirementCache

from rankzero.messages import CannotStart
from running import fit_in_process, refusal_of, weights
from system.forks import summary

TOY = ("--model", "MLP", "--data", "Toy", "--epochs", "1")


def test_a_stored_configuration_reproduces_its_run(cwd):
    settings = ("--data.count", "256", "--batch_size", "16", "--seed", "3", "--model.hidden_sizes", "[8, 4]")
    fit_in_process(*TOY, "--run", "x", *settings)
    config = cwd / "runs/x/config.yaml"
    assert "name" not in yaml.safe_load(config.read_text())
    fit_in_process("--config", str(config), "--run", "y")
    first, second = weights(cwd / "runs/x"), weights(cwd / "runs/y")
    assert all((first[name] == second[name]).all() for name in first) and first.keys() == second.keys()
    assert summary(cwd, "y")["steps"] == 16


def test_flags_override_a_config_file_at_any_position(cwd):
    text = "epochs: 5\nmodel: MLP\ndata: {class_path: Toy, init_args: {count: 256}}\nbatch_size: 64\n"
    (cwd / "c.yaml").write_text(text)
    fit_in_process("--epochs", "1", "--config", "c.yaml", "--run", "x")
    assert (summary(cwd)["epochs"], summary(cwd)["steps"]) == (1, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        "--model.optimizer AdamW --model.optimizer.lr 0.001 --model.schedule OneCycle",
        "--model.schedule Constant --model.schedule.warmup_steps 5",
        "--model.schedule torch.optim.lr_scheduler.StepLR --model.schedule.step_size 1",
        "--model.schedule lightning.pytorch.cli.ReduceLROnPlateau --model.schedule.monitor val/loss",
        *("--optimizer Adam --optimizer.lr 0.01", "--precision bf16-mixed"),
        "--trainer.accumulate_grad_batches 4 --trainer.gradient_clip_val 0.5",
        "--trainer.logger false --trainer.enable_checkpointing false",
        "--save_every 3steps --trainer.val_check_interval 0.25",
    ],
)
@pytest.mark.filterwarnings("ignore:.*will be overridden by")
def test_a_run_accepts_settings_of_optimizer_schedule_precision_and_trainer(cwd, arguments):
    assert fit_in_process(*TOY, "--data.count", "256", "--run", "x", *arguments.split()) == 0
    assert summary(cwd)["status"] == "finished"


USER_MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset
from lightning_modules import MLP

class Net(LightningModule):
    def __init__(self, num_classes: int = None, width: int = 3):
        super().__init__()
        self.layer = torch.nn.Linear(4, num_classes)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    num_classes = 5
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(50, 4)), batch_size=8, shuffle=True)
    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(21, 4)), batch_size=8)

class Own(MLP):
    pass

class WithLoaders(Net):
    def __init__(self):
        super().__init__(num_classes=2)
    def train_dataloader(self):
        return Data().train_dataloader()

class WithAttribute(WithLoaders):
    train_dataloader = LightningModule.train_dataloader

    def __init__(self):
        super().__init__()
        self.train_dataloader = Data().train_dataloader
"""


@pytest.fixture
def user_module(add_module):
    add_module("mine", USER_MODULE)


@pytest.mark.parametrize(("arguments", "classes"), [((), 5), (("--model.num_classes", "2"), 2)])
def test_a_users_model_and_data_module_train_with_num_classes_of_the_data_module(cwd, user_module, arguments, classes):
    assert fit_in_process("--model", "mine.Net", "--data", "mine.Data", "--epochs", "2", *arguments) == 0
    found = summary(cwd, "Net-Data-1")
    assert (found["samples"], found["steps"]) == (100, 14) and set(found["metrics"]) == {"loss", "val_loss"}
    assert weights(cwd / "runs/Net-Data-1")["layer.bias"].shape == (classes,)


@pytest.mark.filterwarnings("ignore:.*you have no `val_dataloader`", "ignore:.*but have no `val_dataloader`")
@pytest.mark.parametrize("name", ["WithLoaders", "WithAttribute"])
def test_a_model_with_its_own_loaders_needs_no_data_module(cwd, user_module, name):
    assert fit_in_process("--model", f"mine.{name}", "--epochs", "1") == 0
    assert summary(cwd, f"{name}-own-1")["samples"] == 50
    fit_in_process("--config", f"runs/{name}-own-1/config.yaml", "--run", "again")
    assert summary(cwd, "again")["samples"] == 50


@pytest.mark.parametrize("model", ["--model mine.Net", "--model.class_path mine.Net", "--model mine.Own"])
def test_a_users_model_without_loaders_needs_data(cwd, user_module, model):
    error = refusal_of(fit_in_process, *model.split())
    assert error.asked == model and error.instead == "--data mine.Data"
    assert "has no train_dataloader; choose CIFAR10, Digits" in error.found
    assert {*os.listdir(cwd)} - {"__pycache__"} == {"mine.py"}


def test_data_that_does_not_fit_the_default_model_is_refused_with_a_model_of_its_module(cwd, user_module):
    error = refusal_of(fit_in_process, "--data", "mine.Data")
    assert (error.asked, error.instead) == ("--data mine.Data", "--model mine.Net")
    assert "ResNet needs in_channels" in error.found and "the data module has no such attribute" in error.found


BAD_INPUT = [
    *(("--trainer.max_epoch 3", "--trainer.max_epochs"), ("--trainer.max_epochs x", "expected int")),
    *(("--trainer.precision 17", "expected one of"), ("--trainer.val_check_interval 5.5", "val_check_interval")),
    ("--trainer.strategy fsdp", "ddp_find_unused_parameters_true"),
    ("--model ResNet --model.dept 18", "type   --model.depth"),
    ("--config unknown.yaml", "type   model.depth: 18, in --config unknown.yaml"),
    ("--model MLP --model.hidden_sizes [8,0]", "hidden_sizes is"),
    ("--model ResNet --data Toy", "type   --model MLP"),
    ("--model MLP --trainer.logger WandbLogger", "type   pip install 'wandb>=0."),
    ("--model MLP --config logger.yaml", "asked  trainer.logger: WandbLogger, in --config logger.yaml\n"),
    ("--config epochs.yaml", "type   epochs: 10, in --config epochs.yaml"),
    *(("--data ImageFolder", "--data.root"), ("--data ImageFolder --data.root nowhere", "nowhere does not exist")),
    ("--data ImageFolder --data.root empty", "contains no folders"),
    *(("--data.batch_size 0", "1 or more"), ("--data.batch_size 2000", "1,437 training samples")),
    ("--batch_size 2000", "type   --batch_size 1437, or less"),
    ("--batch_size 8 --global_batch_size 8", "only one of the two"),
    *(("--config trainer.yaml", "--trainer.max_epochs"), ("--root file", "is a file")),
    ("--root /proc/nowhere", "folder where you may write"),
    ("--resume nowhere", "there is no such file or folder"),
    ("--backend nccl --accelerator cpu", "--backend gloo"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_gives_one_message_and_creates_nothing(cwd, monkeypatch, arguments, message):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", RequirementCache("wandb>=0.99999"))
    (cwd / "empty").mkdir()
    (cwd / "file").write_text("")
    (cwd / "unknown.yaml").write_text("model: {class_path: ResNet, init_args: {dept: 18}}")
    (cwd / "epochs.yaml").write_text("epochs: many")
    (cwd / "logger.yaml").write_text("trainer: {logger: {class_path: WandbLogger}}")
    (cwd / "trainer.yaml").write_text("trainer: {max_epoch: 3}")
    before = sorted(os.listdir(cwd))
    with pytest.raises(CannotStart) as error:
        fit_in_process(*arguments.split())
    assert message in str(error.value)
    assert sorted(os.listdir(cwd)) == before
