"""Compares every public attribute of the Trainer, its checkpoint callback and its logger with stock Lightning's."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest

import rankzero
from contract import check, loader, observe

OBJECTS = {"trainer": lambda trainer: trainer, "checkpoint": lambda trainer: trainer.checkpoint_callback}
OBJECTS["logger"] = lambda trainer: trainer.logger
SETTINGS = {"logger": None, "enable_checkpointing": None, "default_root_dir": "root"}
FILES = "files lie in"
DIFFERS = {
    "trainer.callbacks": "Lightning's progress bar",
    **dict.fromkeys(["trainer.log_dir", "logger.log_dir", "logger.root_dir", "logger.name"], FILES),
    "checkpoint.best_model_path": "a default checkpoint is a file",
    "checkpoint.dirpath": FILES,
    **dict.fromkeys(["checkpoint.last_model_path", "checkpoint.save_last"], "`last_model_path` is empty"),
}
"""Attribute, such as `trainer.log_dir` -> start of its row in the table of differences."""


class Reads(pl.Callback):
    """Reads all attributes in some hooks of a training."""

    def __init__(self, script):
        self.read = lambda when, trainer: read(script, when, trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 2):
            self.read("in a step", trainer)

    def on_validation_epoch_end(self, trainer, module):
        if trainer.current_epoch == 1:
            self.read("in validation", trainer)

    def on_fit_end(self, trainer, module):
        self.read("at the end", trainer)


def names_of(instance):
    """Returns the public attributes of a stock object; hooks of callbacks are called by the Trainer alone."""
    names = {name for name in (*dir(type(instance)), *vars(instance)) if not name.startswith("_")}
    return sorted(name for name in names if not (isinstance(instance, pl.Callback) and hasattr(pl.Callback, name)))


def read(script, when, trainer):
    for kind, find in OBJECTS.items():
        for name in NAMES[kind]:
            try:
                value = script.plain(getattr(find(trainer), name))
            except Exception as error:
                value = type(error).__name__
            script.note(**{f"{kind}.{name} {when}": value})


def scenario(script):
    trainer, net = script.trainer(**SETTINGS, callbacks=[Reads(script)]), script.net()
    read(script, "before", trainer)
    trainer.fit(net, loader(), loader(8))
    read(script, "after fit", trainer)
    trainer.test(net, loader(8), verbose=False)
    read(script, "after test", trainer)
    trainer.predict(net, loader(8))
    read(script, "after predict", trainer)


def stock_names(script):
    trainer = script.trainer(**SETTINGS)
    script.note(**{kind: names_of(find(trainer)) for kind, find in OBJECTS.items()})


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Returns what stock's and Rankzero's objects have observed, by attribute."""
    return [
        observe(kind, scenario, tmp_path_factory.mktemp("attributes") / "x") for kind in (rankzero.Trainer, pl.Trainer)
    ]


with tempfile.TemporaryDirectory() as folder:
    NAMES = observe(pl.Trainer, stock_names, Path(folder) / "x")


@pytest.mark.parametrize("attribute", [f"{kind}.{name}" for kind, names in NAMES.items() for name in names])
def test_an_attribute_has_the_value_that_it_has_in_lightning(values, attribute):
    found, expected = (
        {key: value for key, value in side.items() if key.startswith(f"{attribute} ")} for side in values
    )
    check(found, expected, {attribute: DIFFERS[attribute]} if attribute in DIFFERS else {})
