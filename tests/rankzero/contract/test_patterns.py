"""Compares documented patterns of scripts, such as a tuner or a second fit, with stock Lightning."""

import copy
import pickle
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from contract import KEYS, Net, compare, loader, rows_from
from stock import QUIET

EPOCH, RATE = "the checkpoint at the end of epoch 0", "a resumed optimizer keeps"
DEFAULT = {"logger": None, "enable_checkpointing": None}
CASES = {}


def pattern(**differs):
    """Adds a scenario; `differs` maps noted values to the start of a row in the table of differences."""

    def add(scenario):
        CASES[scenario.__name__] = pytest.param(scenario, differs, id=scenario.__name__)
        return scenario

    return add


class Rows(pl.LightningDataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(rows_from(12)), self.batch_size)

    test_dataloader = val_dataloader = train_dataloader


class Calls(Logger):
    """A user's logger that keeps the calls of its methods."""

    name, version = "mine", 3

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append(["metrics", step, dict(metrics)])

    def log_hyperparams(self, parameters, *_, **__):
        self.calls.append(["parameters", dict(parameters)])

    def finalize(self, status):
        self.calls.append(["finalize", status])


def fit(script, net=None, data=None, **settings):
    """Trains, and returns the Trainer and the module."""
    trainer, net = script.trainer(**settings), net or script.net()
    trainer.fit(net, loader() if data is None else data, loader(8))
    return trainer, net


@pattern(epochs=EPOCH, seen=EPOCH, calls=EPOCH)
def paths_of_default_checkpoints_can_be_loaded(script):
    trainer, _ = fit(script, **DEFAULT)
    path = trainer.checkpoint_callback.best_model_path
    script.note(exists=Path(path).exists(), epochs=torch.load(path, weights_only=True)["epoch"])
    script.note(loaded=Net.load_from_checkpoint(path).state_dict())
    trainer, net = script.trainer(max_epochs=3, **DEFAULT), script.net()
    trainer.fit(net, loader(), loader(8), ckpt_path=path)
    script.note_state(trainer, net)


@pattern(weights=RATE, optimizers=RATE, metrics=RATE, seen=RATE)
def a_run_resumes_with_another_learning_rate(script):
    fit(script)[0].save_checkpoint("saved.ckpt")
    trainer, net = script.trainer(max_epochs=3), script.net(lr=0.2)
    trainer.fit(net, loader(), loader(8), ckpt_path="saved.ckpt")
    script.note_state(trainer, net)


@pattern()
def best_of_default_checkpoints_is_tested(script):
    trainer, _net = fit(script, **DEFAULT)
    for path in ("best", "last", None):
        script.call(f"tested {path}", trainer.test, dataloaders=loader(8), ckpt_path=path)


@pattern()
def best_of_an_own_checkpoint_is_used_without_a_path(script):
    own = ModelCheckpoint("kept", monitor="val", mode="max")
    trainer, net = fit(script, callbacks=own, enable_checkpointing=True)
    for stage in ("validate", "test", "predict"):
        script.call(stage, getattr(trainer, stage), dataloaders=loader(8))
    script.note(best=own.best_model_path, score=own.best_model_score, weights=net.state_dict(), path=trainer.ckpt_path)


@pattern()
def learning_rate_is_found_before_the_fit(script):
    trainer, net = script.trainer(max_epochs=1), script.net()
    for name in ("first", "second"):
        found = Tuner(trainer).lr_find(net, loader(64), num_training=20)
        script.note(**{name: found.results, f"{name} rate": found.suggestion(), f"{name} set": net.hparams.lr})
    trainer.fit(net, loader(), loader(8))
    script.note_state(trainer, net)


@pattern()
def batch_size_is_found_before_the_fit(script):
    trainer, net, data = script.trainer(max_epochs=1), script.net(), Rows()
    found = Tuner(trainer).scale_batch_size(net, datamodule=data, max_trials=2, steps_per_trial=1)
    script.note(found=found, size=data.batch_size)
    trainer.fit(net, datamodule=data)
    script.note_state(trainer, net)


@pattern()
def fit_is_called_again_with_more_epochs_and_other_data(script):
    trainer, net = fit(script)
    script.note_state(trainer, net, "first ")
    trainer.fit(net, loader(), loader(8))
    script.note_state(trainer, net, "same ")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(net, loader(6), loader(4))
    script.note_state(trainer, net, "second ")
    script.note(epoch=trainer.current_epoch, step=trainer.global_step)


@pattern()
def another_module_is_trained_by_the_same_trainer(script):
    trainer, _ = fit(script)
    net = script.net(width=5)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, loader())
    script.note_state(trainer, net)


@pattern()
def unseeded_trainers_of_a_process_shuffle_differently(script):
    orders = set()
    for _ in range(4):
        _, net = fit(script, data=loader(shuffle=True), max_epochs=1)
        orders.add(str([seen[2].tolist() for seen in net.seen if seen[0] == "train"]))
    script.note(different=len(orders))


@pattern()
def a_checkpoint_on_a_remote_file_system_is_resumed_and_tested(script):
    trainer, _ = fit(script)
    trainer.save_checkpoint("memory://saved.ckpt")
    net, trainer = script.net(), script.trainer(max_epochs=3)
    script.call("fit", trainer.fit, net, loader(), loader(8), ckpt_path="memory://saved.ckpt")
    script.call("test", trainer.test, net, loader(8), ckpt_path="memory://saved.ckpt")
    script.note_state(trainer, net)


@pattern()
def a_scheduler_without_a_state_is_saved(script):
    class NoState(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return None

        def load_state_dict(self, state):
            pass

    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [NoState(optimizer, 1)]

    trainer, net = fit(script, script.net(Scheduled), **DEFAULT)
    script.note(weights=net.state_dict(), step=trainer.global_step)


@pattern()
def a_trainer_is_copied_and_pickled(script):
    trainer, net = script.kind(**QUIET, max_epochs=1), Net()
    script.call("copy", copy.deepcopy, trainer).fit(Net(), loader())
    script.call("pickle", lambda: type(pickle.loads(pickle.dumps(trainer))).__name__)
    trainer.fit(net, loader())
    script.note(steps=len(net.seen))
    script.call("copy after fit", lambda: copy.deepcopy(trainer).global_step)
    script.call("pickle after fit", lambda: pickle.loads(pickle.dumps(trainer)).current_epoch)


@pattern()
def a_users_logger_receives_what_the_script_logs(script):
    accumulates = {"accumulate_grad_batches": 2, "val_check_interval": 4}
    for settings in ({}, {"profiler": "simple"}, accumulates, {"fast_dev_run": 2}):
        loggers = [Calls(), Calls()]
        trainer, net = fit(script, logger=loggers, **settings)
        trainer.test(net, loader(8), verbose=False)
        script.note(**{f"calls with {settings}": [logger.calls for logger in loggers]})


@pattern()
def nothing_is_written_if_nothing_is_wanted(script):
    for settings in ({}, {"fast_dev_run": True, **DEFAULT}, {"barebones": True, "log_every_n_steps": None, **DEFAULT}):
        trainer, _ = fit(script, **settings)
        files = sorted(map(str, script.folder.rglob("*")))
        script.note(**{f"files with {settings}": files, f"log_dir with {settings}": trainer.log_dir})


@pattern()
def all_files_lie_below_the_default_root_directory(script):
    trainer, _ = fit(script, default_root_dir=script.folder / "root", **DEFAULT)
    script.note(folders={path.name for path in script.folder.iterdir()}, root=trainer.default_root_dir)
    script.note(is_below=Path(trainer.log_dir).is_relative_to(script.folder / "root"))


@pattern(fit="a `StopIteration` from a collate function")
def a_collate_function_ends_the_epoch(script):
    def collate(rows, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 3:
            raise StopIteration
        return torch.stack([row for (row,) in rows])

    script.call("fit", fit, script, data=loader(collate_fn=collate), max_epochs=1)


@pattern()
def loaders_are_reloaded_after_a_resume(script):
    class Reloaded(Rows):
        loaded = 0

        def train_dataloader(self):
            self.loaded += 1
            return super().train_dataloader()

    data = Reloaded()
    trainer = script.trainer(reload_dataloaders_every_n_epochs=1)
    trainer.fit(script.net(), datamodule=data)
    trainer.save_checkpoint("saved.ckpt")
    other, net = script.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=1), script.net()
    other.fit(net, datamodule=data, ckpt_path="saved.ckpt")
    script.note(loaded=data.loaded)
    script.note_state(other, net)


@pattern(rows="a `CSVLogger` in a fixed folder")
def a_csv_logger_writes_the_columns_of_the_script_and_is_resumed_in_a_fixed_folder(script):
    trainer, _ = fit(script, logger=CSVLogger("csv", name="", version=""))
    script.note(first=Path("csv/metrics.csv").read_text().splitlines(), files=script.files(), folder=trainer.log_dir)
    trainer.save_checkpoint("saved.ckpt")
    other = script.trainer(max_epochs=3, logger=CSVLogger("csv", name="", version=""))
    other.fit(script.net(), loader(), loader(8), ckpt_path="saved.ckpt")
    script.note(rows=Path("csv/metrics.csv").read_text().splitlines())


@pattern()
def a_saved_checkpoint_has_lightnings_keys_and_stock_lightning_resumes_it(script):
    trainer, _ = fit(script)
    trainer.save_checkpoint("saved.ckpt")
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    for name in ("saved", "weights"):
        saved = torch.load(f"{name}.ckpt", weights_only=True)
        script.note(**{f"{name} keys": sorted(KEYS & saved.keys()), f"{name} state": saved["state_dict"]})
    net, stock = script.net(), pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, accelerator="cpu")
    stock.fit(net, loader(), loader(8), ckpt_path="saved.ckpt")
    script.note(resumed=net.state_dict(), step=stock.global_step)
    script.note(loaded=Net.load_from_checkpoint("weights.ckpt", lr=0.5).hparams)


@pattern()
def an_error_of_the_user_passes_and_the_trainer_is_used_again(script):
    class Fails(Net):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and batch_idx == 2:
                raise KeyError("the user's own")
            return super().training_step(batch, batch_idx)

    trainer, net = script.trainer(), script.net(Fails)
    script.call("fit", trainer.fit, net, loader())
    script.note(interrupted=trainer.interrupted, stage=str(trainer.state.stage), status=str(trainer.state.status))


@pytest.mark.parametrize(("scenario", "differs"), CASES.values())
def test_a_documented_pattern_does_what_it_does_in_lightning(tmp_path, scenario, differs):
    compare(scenario, tmp_path, differs=differs)
