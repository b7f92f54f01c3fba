import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, random_split

from rankzero.distributed.devices import WorldInfo
from rankzero.distributed.environments.launch import Launch
from rankzero.preflight.trial import SECONDS, STEPS, Trial, _Repeated
from rankzero.sampling.plan import SamplingPlan

LAUNCH = Launch(rank=1, local_rank=1, world_size=4, local_world_size=4)


class Data(LightningDataModule):
    """Records the calls of its hooks, and what they see of the Trainer."""

    def __init__(self, workers=0):
        super().__init__()
        self.calls, self.workers = [], workers

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage} as rank {self.trainer.global_rank} of {self.trainer.world_size}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return DataLoader(torch.randn(40, 32), batch_size=2, num_workers=self.workers)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("on_after_batch_transfer")
        return batch


class Model(BoringModel):
    """Uses the data module of its Trainer, and counts its steps."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def training_step(self, batch, batch_idx):
        assert self.trainer.datamodule.calls
        self.sizes.append(len(batch))
        return super().training_step(batch, batch_idx)


def start(model, data, **sizes):
    plan = SamplingPlan(rank=1, world_size=4, **sizes)
    return Trial(LAUNCH, WorldInfo("cpu", size=4, devices=4), model, data, plan, {"max_epochs": 3})


def test_hooks_are_called_once_and_see_the_rank_of_the_run():
    model, data = Model(), Data()
    trial = start(model, data, batch_size=5)
    trial.prepare_data()
    loaded = trial.load_batch()
    result = trial.train()
    assert [call for call in data.calls if call != "on_after_batch_transfer"] == [
        "setup fit as rank 1 of 4",
        "train_dataloader",
    ]
    assert data.calls.count("on_after_batch_transfer") == 6 and model.sizes == [5] * 6  # three epochs of 40 / (4 * 5)
    assert loaded["prefetched_bytes"] == loaded["workers"] == 0 and loaded["data"]["samples"] == "40"
    assert result["seconds"] > 0 and result["peak_bytes"] > 1e7


def test_only_the_first_rank_of_a_machine_prepares_data():
    data = Data()
    plan = SamplingPlan(world_size=4)
    first = Trial(Launch(rank=2, local_rank=0, world_size=4), WorldInfo("cpu", size=4), Model(), data, plan, {})
    first.prepare_data()
    assert data.calls == ["prepare_data"]
    data.prepare_data_per_node = False
    first.prepare_data()
    assert data.calls == ["prepare_data"]


def test_a_trial_accepts_loaders_instead_of_a_data_module():
    class PlainModel(BoringModel):
        count = 0

        def training_step(self, batch, batch_idx):
            self.count += 1
            assert set(batch) == {"a", "b"} and len(batch["a"]) == 3
            return super().training_step(batch["a"], batch_idx)

    model, loaders = PlainModel(), {name: DataLoader(torch.randn(40, 32), batch_size=3) for name in ("a", "b")}
    trial = start(model, loaders)
    trial.prepare_data()
    assert trial.load_batch()["workers"] == 0
    trial.train()
    assert model.count == 12  # three epochs of 40 / (4 * 3)


def test_a_trial_reads_the_loaders_of_a_model():
    model = BoringModel()
    trial = start(model, None)
    trial.prepare_data()
    assert trial.load_batch()["workers"] == 0
    assert trial.train()["seconds"] > 0


def test_loader_processes_are_counted():
    trial = start(Model(), Data(workers=2))
    loaded = trial.load_batch()
    assert loaded["workers"] == 2 and loaded["prefetched_bytes"] == 2 * 2 * 2 * 32 * 4


def test_an_error_of_the_model_is_raised():
    class Broken(Model):
        def training_step(self, batch, batch_idx):
            raise ValueError("wrong shape")

    trial = start(Broken(), Data())
    trial.load_batch()
    with pytest.raises(ValueError, match="wrong shape"):
        trial.train()


class OneCycle(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=self.trainer.max_epochs, steps_per_epoch=10)
        ]


class Plateau(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class NeedsValidation(Model):
    def on_train_epoch_end(self):
        raise KeyError(self.trainer.callback_metrics["val/loss"])


class WritesToTensorBoard(Model):
    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("x", 1.0, batch_idx)
        return super().training_step(batch, batch_idx)


class WritesToItsFolder(Model):
    def training_step(self, batch, batch_idx):
        assert Path(self.trainer.log_dir).is_dir() and Path(self.logger.log_dir).is_dir()
        return super().training_step(batch, batch_idx)


class SavesCheckpoints(Model):
    def configure_callbacks(self):
        raise AssertionError("a callback of the model was built")


class Gathers(Model):
    def training_step(self, batch, batch_idx):
        assert self.all_gather(batch).shape == (4, *batch.shape)
        assert not self.trainer.is_global_zero and self.trainer.world_size == 4
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "model", [OneCycle, Plateau, NeedsValidation, WritesToTensorBoard, WritesToItsFolder, SavesCheckpoints, Gathers]
)
def test_a_model_that_trains_in_a_run_is_tried_without_error(model):
    trial = start(model(), Data())
    trial.prepare_data()
    trial.load_batch()
    assert trial.train()["seconds"] > 0


def test_fast_steps_are_tried_for_a_second():
    model = Model()
    trial = start(model, Data(), batch_size=2)
    trial.trainer.fit_loop.max_epochs = 1_000
    trial.load_batch()
    trial.train()
    assert len(model.sizes) > STEPS and sum(trial._timer.seconds) >= SECONDS


def test_a_data_set_without_a_length_is_tried_for_thirty_steps():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.randn(40, 32))

    model = BoringModel()
    trial = start(model, DataLoader(Stream(), batch_size=2))
    trial.load_batch()
    trial.train()
    assert len(trial._timer.seconds) == STEPS


def test_a_trial_has_no_more_steps_than_its_run():
    """A schedule of the learning rate may end with the run; a step after its end is an error."""

    class EndsWithTheRun(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    model = EndsWithTheRun()
    trial = start(model, Data(), batch_size=2)
    trial.load_batch()
    assert trial.train()["seconds"] > 0 and len(model.sizes) == 15


def test_a_combined_loader_is_tried():
    class Paired(BoringModel):
        def training_step(self, batch, batch_idx):
            assert len(batch) == 2
            return super().training_step(batch[0], batch_idx)

    loaders = CombinedLoader([DataLoader(torch.randn(40, 32), batch_size=2) for _ in range(2)], "min_size")
    trial = start(Paired(), loaders)
    trial.load_batch()
    assert trial.train()["seconds"] > 0


def test_each_step_gets_its_own_copy_of_the_batch():
    batch = {"x": torch.ones(2)}
    first, second = _Repeated(batch, 2)
    first["x"].zero_()
    assert second["x"].tolist() == batch["x"].tolist() == [1, 1]


def test_a_rank_without_samples_has_no_time():
    trial = start(Model(), Data(), global_batch_size=1)
    trial.load_batch()
    assert trial.train() == {"seconds": None, "peak_bytes": 0}


def test_random_splits_are_equal_on_all_ranks():
    class Split(Data):
        def train_dataloader(self):
            first, _ = random_split(list(range(40)), [20, 20])
            return DataLoader(first, batch_size=2)

    fingerprints = []
    for _ in range(2):
        torch.seed()
        fingerprints.append(start(BoringModel(), Split()).load_batch()["data"])
    assert fingerprints[0] == fingerprints[1]


def test_an_interrupt_is_raised_and_can_be_repeated():
    class Interrupted(Model):
        def training_step(self, batch, batch_idx):
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    trial = start(Interrupted(), Data())
    trial.load_batch()
    with pytest.raises(KeyboardInterrupt):
        trial.train()
    assert signal.getsignal(signal.SIGINT) == handler


def test_sigterm_does_not_end_a_trial():
    handlers = signal.getsignal(signal.SIGTERM)

    class Observes(Model):
        def training_step(self, batch, batch_idx):
            assert signal.getsignal(signal.SIGTERM) == handlers
            return super().training_step(batch, batch_idx)

    trial = start(Observes(), Data())
    trial.load_batch()
    assert trial.train()["seconds"] > 0
