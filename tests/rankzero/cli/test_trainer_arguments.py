import inspect
import sys
from datetime import timedelta
from pathlib import Path
from typing import get_type_hints

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, TorchCheckpointIO
from lightning.pytorch.plugins.environments import KubeflowEnvironment, LightningEnvironment, SLURMEnvironment

from rankzero import Trainer
from rankzero.cli.trainer_arguments import TRAINER_FLAGS, as_arguments, as_list, read_arguments, without_replaced
from running import refusal_of


def test_the_signature_is_that_of_lightnings_trainer_and_every_flag_with_the_same_default():
    parameters, stock = (dict(inspect.signature(kind).parameters) for kind in (Trainer, pl.Trainer))
    types, stock_types = (get_type_hints(kind.__init__) for kind in (Trainer, pl.Trainer))
    assert {name: (parameters[name].kind, parameters[name].default, types[name]) for name in stock} == {
        name: (one.kind, one.default, stock_types[name]) for name, one in stock.items()
    }
    own = {name: one.default for name, one in parameters.items() if name not in stock}
    flag_defaults = {name: None if flag.default is None else str(flag.default) for name, flag in TRAINER_FLAGS.items()}
    assert own.keys() == TRAINER_FLAGS.keys() and read_arguments(own) == read_arguments(flag_defaults)
    assert all(f"  {name}: " in inspect.getdoc(Trainer.__init__) for name in parameters)


def test_lightning_cli_builds_the_trainer_and_resumes_its_run(script_folder, capsys):
    def start(*arguments):
        return LightningCLI(BoringModel, BoringDataModule, trainer_class=Trainer, args=["fit", *arguments]).trainer

    arguments = ("--trainer.name=x", "--trainer.save_every=2steps", "--trainer.limit_train_batches=3")
    for epochs in (1, 2):
        trainer = start(*arguments, "--trainer.quiet=true", f"--trainer.max_epochs={epochs}")
        assert (trainer.global_step, str(trainer.run.path)) == (3 * epochs, "runs/x")
    with pytest.raises(SystemExit):
        start("--help")
    printed = capsys.readouterr().out
    assert "Number of optimizer steps" in printed and "Number of newest checkpoints to keep" in printed


def test_a_script_may_replace_lightnings_trainer(script_folder, monkeypatch):
    monkeypatch.setattr(pl, "Trainer", Trainer)
    trainer = pl.Trainer(max_steps=1, logger=False, quiet=True)
    trainer.fit(BoringModel())
    assert trainer.global_step == 1


def test_flags_in_a_message_are_rewritten_as_trainer_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    expected = {
        "--save_every 200steps": 'save_every="200steps"',
        "--epochs 4, or --backend gloo": 'max_epochs=4, or backend="gloo"',
        "--trainer.strategy auto or ddp": 'strategy="auto" or ddp',
        "the same command with --name ANOTHER-NAME": "the same script with name=ANOTHER-NAME",
        "--model net.Net for run x": "the model net.Net for run x",
        "--devices None -> 2": "devices=None -> 2",
        "--global_batch_size 3 with a BatchSizeFinder": "global_batch_size=3 with a BatchSizeFinder",
        "--seed 3": "seed=3",
        "omit --nodes and --devices": "omit num_nodes and devices",
        "srun --nodes=2 python launch/fit.py --epochs 3": "srun --nodes=2 python train.py --epochs 3",
        "  type   torchrun --nnodes 2 launch/fit.py": "  type   torchrun --nnodes 2 train.py",
        "         or torchrun --nnodes 2 launch/fit.py": "         or torchrun --nnodes 2 train.py",
    }
    assert {flags: as_arguments(flags) for flags in expected} == expected


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        *(("time_limit", timedelta(minutes=90), "5400s"), ("time_limit", "2h", "7200s"), ("save_every", 3, "3")),
        *(("trust_checkpoint", True, "yes"), ("fast", False, "no"), ("start_timeout", 10.0, 10)),
        ("accept_changed", ["data", "global_batch_size"], "data,global_batch_size"),
        *(("root", Path("runs/here"), "runs/here"), ("name", None, None)),
    ],
)
def test_trainer_arguments_are_read_like_the_flags_of_the_same_name(name, argument, value):
    assert read_arguments({name: argument}) == {name: value}


def test_a_wrong_argument_raises_a_request_error_and_lists_may_be_one_value():
    for name, argument in (("keep", 1.5), ("keep", True), ("batch_size", "many"), ("seed", -1)):
        assert refusal_of(read_arguments, {name: argument}).asked.startswith(f"--{name}")
    assert (as_list(None), as_list(1), as_list((1, 2))) == ([], [1], [1, 2])


@pytest.mark.parametrize(
    ("plugin", "launcher", "requeue"),
    [
        (LightningEnvironment(), "local", "auto"),
        (SLURMEnvironment(), "auto", "auto"),
        (SLURMEnvironment(auto_requeue=False), "auto", "never"),
        (AsyncCheckpointIO(TorchCheckpointIO()), "auto", "auto"),
    ],
    ids=("local", "slurm", "no_requeue", "async"),
)
def test_plugins_whose_work_rankzero_does_set_arguments(plugin, launcher, requeue):
    precision, arguments = DoublePrecision(), {"launcher": "auto", "requeue": "auto"}
    assert without_replaced([plugin, precision], arguments) == [precision]
    assert arguments == {"launcher": launcher, "requeue": requeue}


OWN = (type("OwnCheckpointIO", (TorchCheckpointIO,), {}), type("OwnEnvironment", (LightningEnvironment,), {}))


@pytest.mark.parametrize("kind", [*OWN, KubeflowEnvironment])
def test_plugins_that_replace_checkpoints_or_launchers_are_refused_by_name(kind):
    error = refusal_of(without_replaced, [kind()], {"launcher": "auto", "requeue": "auto"})
    assert kind.__name__ in error.asked
