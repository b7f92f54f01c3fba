"""Trains the GAN of tests/public in a script."""

import lightning as L
from gan import GAN, RingDataModule
from options import finish, options

from rankzero import Trainer

if __name__ == "__main__":
    L.seed_everything(7)
    trainer = Trainer(max_epochs=2, strategy="ddp_find_unused_parameters_true", **options())
    model, data = GAN(), RingDataModule()
    trainer.fit(model, data)
    finish(trainer, model, data)
