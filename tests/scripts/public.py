"""Trains a module of tests/public in a script; the first word of the command line names it."""

import sys

import lightning as L
from autoencoder import DigitsDataModule, LitAutoEncoder
from gan import GAN, RingDataModule
from language_model import GPT, TextModule
from options import finish, options

from rankzero import Trainer

MODULES = {
    "autoencoder": (LitAutoEncoder, DigitsDataModule, {}),
    "gan": (GAN, RingDataModule, {"strategy": "ddp_find_unused_parameters_true"}),
    "language_model": (GPT, TextModule, {"gradient_clip_val": 0.25}),
}


def main():
    model_class, data_class, settings = MODULES[sys.argv.pop(1)]
    L.seed_everything(7)
    trainer, model, data = Trainer(max_epochs=2, **settings, **options()), model_class(), data_class()
    trainer.fit(model, data)
    finish(trainer, model, data)


if __name__ == "__main__":
    main()
