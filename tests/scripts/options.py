"""What the examples read from their command lines: arguments of the Trainer, and when to be killed."""

import ast
import sys

import torch
from killing import KillAt


def options() -> dict:
    """The Trainer's arguments: `name=x devices=2 kill=5` has the run killed after its fifth batch."""
    values = dict(argument.split("=", 1) for argument in sys.argv[1:])
    values = {name: ast.literal_eval(text) if text[:1].isdigit() else text for name, text in values.items()}
    kill = values.pop("kill", None)
    quiet = {"accelerator": "cpu", "enable_model_summary": False, "save_every": "3steps"}
    return {**quiet, **values, "callbacks": [KillAt(kill, run=values["name"])] if kill else []}


def finish(trainer, model, *loaders) -> None:
    """Writes what was learned, for the test to compare."""
    tested = trainer.test(model, *loaders, verbose=False)
    if trainer.is_global_zero:
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        torch.save({"state": state, "tested": tested}, f"{trainer.run.name}.pt")
