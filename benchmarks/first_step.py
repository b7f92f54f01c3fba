"""A callback as a user writes one: says when the first step is done."""

from typing import Any

from lightning.pytorch import Callback, Trainer


class FirstStep(Callback):
    """Prints a line behind the first optimiser step."""

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == 1:
            print("first step done", flush=True)
