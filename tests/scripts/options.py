"""Command line of the example scripts: arguments of the Trainer, and faults to inject."""

import ast
import sys
import time

import torch
from killing import KillAt
from lightning.pytorch import Callback


class Slow(Callback):
    """Sleeps for some seconds in each batch, so that a signal can arrive in the middle of training."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(self.seconds)


class FailAt(Callback):
    """Raises an error on the last rank, in one batch."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch and trainer.global_rank == trainer.world_size - 1:
            raise KeyError("the example fails")


def options() -> dict:
    """Returns the Trainer's arguments, read from words such as `name=x devices=2`.

    `kill=5` kills the run after its fifth batch, `fail=5` raises an error in the batch with index 5, and `pause=0.1`
    sleeps 0.1 s in each batch.
    """
    values = dict(argument.split("=", 1) for argument in sys.argv[1:])
    values = {name: ast.literal_eval(text) if text[:1].isdigit() else text for name, text in values.items()}
    kill, fail, pause = (values.pop(name, None) for name in ("kill", "fail", "pause"))
    callbacks = [KillAt(kill, run=values["name"])] if kill else []
    callbacks += [FailAt(fail)] if fail else []
    callbacks += [Slow(pause)] if pause else []
    quiet = {"accelerator": "cpu", "enable_model_summary": False, "save_every": "3steps"}
    return {**quiet, **values, "callbacks": callbacks}


def finish(trainer, model, *loaders) -> None:
    """Tests the model, and writes its weights and metrics to a file that the system test compares."""
    tested = trainer.test(model, *loaders, verbose=False)
    if trainer.is_global_zero:
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        torch.save({"state": state, "tested": tested}, f"{trainer.run.name}.pt")
