"""Command line of the example scripts: arguments of the Trainer, and faults to inject."""

import ast
import sys

import torch
from killing import KillAt


def options() -> dict:
    """Returns the Trainer's arguments, read from words such as `name=x devices=2`.

    `kill=5` kills the run after its fifth batch.
    """
    values = dict(argument.split("=", 1) for argument in sys.argv[1:])
    values = {name: ast.literal_eval(text) if text[:1].isdigit() else text for name, text in values.items()}
    kill = values.pop("kill", None)
    callbacks = [KillAt(kill, run=values["name"])] if kill else []
    quiet = {"accelerator": "cpu", "enable_model_summary": False, "save_every": "3steps"}
    return {**quiet, **values, "callbacks": callbacks}


def finish(trainer, model, *loaders) -> None:
    """Tests the model, and writes its weights and metrics to a file that the system test compares."""
    tested = trainer.test(model, *loaders, verbose=False)
    if trainer.is_global_zero:
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        torch.save({"state": state, "tested": tested}, f"{trainer.run.name}.pt")
