"""Compares each argument of `fit`, `validate`, `test` and `predict` with stock Lightning's."""

import contextlib
import inspect
import io

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

from contract import Net, compare, loader


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(10)

    def val_dataloader(self):
        return loader(6)

    test_dataloader = predict_dataloader = val_dataloader


class ModuleWithLoaders(Net):
    train_dataloader, val_dataloader = Data.train_dataloader, Data.val_dataloader
    test_dataloader = predict_dataloader = val_dataloader


def loaders(**replaced):
    return {"train_dataloaders": loader(), "val_dataloaders": loader(8), **replaced}


def evaluated(**replaced):
    return {"dataloaders": loader(8), **replaced}


CKPT = "kept/epoch=0-step=6.ckpt"
FIT = {
    "model": [lambda net: loaders(), lambda net: loaders(model="text"), lambda net: {"model": ModuleWithLoaders()}],
    "train_dataloaders": [
        lambda net: loaders(train_dataloaders=[loader(), loader(4)]),
        lambda net: loaders(train_dataloaders={"a": loader(), "b": loader(4)}),
        lambda net: loaders(train_dataloaders=CombinedLoader([loader(), loader(4)], "max_size_cycle")),
        lambda net: loaders(train_dataloaders=[torch.ones(2, 4), torch.zeros(2, 4)]),
        lambda net: {"train_dataloaders": Data()},
        lambda net: loaders(train_dataloaders=None),
    ],
    "val_dataloaders": [
        lambda net: loaders(val_dataloaders=[loader(8), loader(4)]),
        lambda net: loaders(val_dataloaders={"a": loader(8), "b": loader(4)}),
        lambda net: loaders(val_dataloaders=None),
    ],
    "datamodule": [lambda net: {"datamodule": Data()}, lambda net: loaders(datamodule=Data())],
    "ckpt_path": [
        lambda net, path=path: loaders(ckpt_path=path)
        for path in (CKPT, "kept/last.ckpt", "last", "best", "missing", "hpc")
    ],
    "weights_only": [
        lambda net: loaders(ckpt_path=CKPT, weights_only=True),
        lambda net: loaders(ckpt_path=CKPT, weights_only=False),
    ],
}
EVALUATE = {
    "model": [lambda net: evaluated(), lambda net: evaluated(model=net), lambda net: {"model": ModuleWithLoaders()}],
    "dataloaders": [
        lambda net: evaluated(dataloaders=[loader(8), loader(4)]),
        lambda net: evaluated(dataloaders={"a": loader(8), "b": loader(4)}),
        lambda net: {"model": net},
        lambda net: evaluated(dataloaders=Data(), model=net),
    ],
    "datamodule": [lambda net: {"datamodule": Data(), "model": net}, lambda net: evaluated(datamodule=Data())],
    "ckpt_path": [
        *(lambda net, path=path: evaluated(model=net, ckpt_path=path) for path in (CKPT, "best", "last", "missing")),
        *(lambda net, path=path: evaluated(ckpt_path=path) for path in (CKPT, "best", "last")),
    ],
    "weights_only": [lambda net: evaluated(ckpt_path=CKPT, weights_only=True)],
}
SHOWN = {**EVALUATE, "verbose": [lambda net: evaluated(verbose=True), lambda net: evaluated(verbose=False)]}
RETURNED = {
    **EVALUATE,
    "return_predictions": [
        lambda net, is_wanted=is_wanted: evaluated(return_predictions=is_wanted) for is_wanted in (True, False, None)
    ],
}
METHODS = {"fit": FIT, "validate": SHOWN, "test": SHOWN, "predict": RETURNED}
DIFFERS = {("fit", "ckpt_path", number): {"calls": "a request that cannot be satisfied"} for number in (3, 4, 5)}
PARAMETERS = [
    pytest.param(method, name, number, id=f"{method}-{name}-{number}")
    for method in METHODS
    for name in list(inspect.signature(getattr(pl.Trainer, method)).parameters)[1:]
    for number in range(len(METHODS[method].get(name, [None])))
]


def trained(script, **settings):
    """Returns a Trainer that has kept the best of two checkpoints, and the last."""
    kept = ModelCheckpoint("kept", monitor="val", save_top_k=2, save_last=True)
    return script.trainer(callbacks=[kept], enable_checkpointing=True, **settings)


def use(script, method, make_arguments):
    trainer, net = trained(script), script.net()
    trainer.fit(net, loader(), loader(8))
    if method == "fit":
        trainer, net = trained(script, max_epochs=3), script.net()
    arguments = {"model": net, **make_arguments(net)} if method == "fit" else make_arguments(net)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        script.call("result", getattr(trainer, method), **arguments)
    script.note(tables=[line for line in output.getvalue().splitlines() if set(line) & set("┃┏")], files=script.files())
    script.note_state(trainer, net)


@pytest.mark.parametrize(("method", "name", "number"), PARAMETERS)
def test_an_argument_of_a_method_does_what_it_does_in_lightning(tmp_path, method, name, number):
    assert name in METHODS[method], f"Lightning's Trainer.{method} has the argument {name}: add it"
    differs = {"saves": "Lightning's progress bar", **DIFFERS.get((method, name, number), {})}
    compare(use, tmp_path, method, METHODS[method][name][number], differs=differs)
