import inspect
from typing import get_type_hints

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from rankzero import Trainer
from rankzero.cli.script_arguments import TRAINER_FLAGS, read_arguments


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
