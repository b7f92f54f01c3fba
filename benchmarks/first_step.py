"""Callback, as a user would write it, that reports the end of the first step."""

from typing import Any

from lightning.pytorch import Callback, Trainer


class FirstStep(Callback):
    """Callback that prints a line after the first optimizer step."""

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == 1:
            print("first step done", flush=True)
