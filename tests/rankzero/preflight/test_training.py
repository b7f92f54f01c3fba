import shutil
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, random_split

from rankzero.distributed.environments.launch import Launch
from rankzero.distributed.world import World
from rankzero.preflight import training
from rankzero.preflight.check import FAIL, OK, WARN
from rankzero.preflight.training import SECONDS, STEPS, Trial, _Repeated, check_data, check_steps, check_workers
from rankzero.sampling.plan import SamplingPlan
from stock import Unsized

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
    """Uses the data module of its Trainer, or batches of two loaders, and records the sizes of its batches."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def training_step(self, batch, batch_idx):
        if isinstance(batch, torch.Tensor):
            assert self.trainer.datamodule.calls
        else:
            batch, second = batch.values() if isinstance(batch, dict) else batch
            assert len(batch) == len(second)
        self.sizes.append(len(batch))
        return super().training_step(batch, batch_idx)


def with_schedule(make_schedule, **settings):
    """Returns a class of models with a schedule of the learning rate."""

    class Scheduled(Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_schedule(self, optimizer), **settings}}

    return Scheduled


def start(model, data, max_epochs=3, **sizes):
    """Starts a trial of rank 1 of 4 and loads its batch; returns the trial and a description of the batch."""
    trial = Trial(World(LAUNCH), model, data, SamplingPlan(rank=1, world_size=4, **sizes), {"max_epochs": max_epochs})
    trial.prepare_data()
    return trial, trial.load_batch()


def test_hooks_are_called_once_and_see_the_rank_of_the_run_and_only_the_first_rank_of_a_machine_prepares_data():
    model, data = Model(), Data()
    trial, loaded = start(model, data, batch_size=5)
    result = trial.train()
    assert data.calls == ["setup fit as rank 1 of 4", "train_dataloader", *["on_after_batch_transfer"] * 6]
    assert model.sizes == [5] * 6  # three epochs of 40 / (4 * 5)
    assert loaded["prefetched_bytes"] == loaded["workers"] == 0 and loaded["data"]["samples"] == "40"
    assert result["seconds"] > 0 and result["peak_bytes"] > 1e7
    data = Data()
    first = Trial(World(Launch(rank=2, local_rank=0, world_size=4)), Model(), data, SamplingPlan(world_size=4), {})
    for per_node in (True, False):
        data.prepare_data_per_node = per_node
        first.prepare_data()
        assert data.calls == ["prepare_data"]


def loaders(size):
    return [DataLoader(torch.randn(40, 32), batch_size=size) for _ in range(2)]


@pytest.mark.parametrize("data", [dict(zip("ab", loaders(3), strict=True)), CombinedLoader(loaders(3), "min_size")])
def test_a_trial_accepts_loaders_instead_of_a_data_module(data):
    model = Model()
    trial, loaded = start(model, data)
    assert loaded["workers"] == 0 and trial.train()["seconds"] > 0
    assert model.sizes == [3] * 12  # three epochs of 40 / (4 * 3)


def test_a_trial_reads_the_loaders_of_a_model_and_counts_loader_processes():
    trial, loaded = start(BoringModel(), None)
    assert loaded["workers"] == 0 and trial.train()["seconds"] > 0
    _, loaded = start(Model(), Data(workers=2))
    assert loaded["workers"] == 2 and loaded["prefetched_bytes"] == 2 * 2 * 2 * 32 * 4


@pytest.mark.parametrize("error", [ValueError("wrong shape"), KeyboardInterrupt()])
def test_an_error_of_the_model_or_an_interrupt_is_raised_and_can_be_repeated(error):
    class Broken(Model):
        def training_step(self, batch, batch_idx):
            raise error

    handler = signal.getsignal(signal.SIGINT)
    trial, _ = start(Broken(), Data())
    with pytest.raises(type(error), match=str(error)):
        trial.train()
    assert signal.getsignal(signal.SIGINT) == handler


SIGTERM_HANDLER = signal.getsignal(signal.SIGTERM)


class UsesItsTrainer(Model):
    """Fails if its step sees something else than in a run, or if a hook is called that a trial leaves out."""

    def configure_callbacks(self):
        raise AssertionError("a callback of the model was built, which might write checkpoints")

    def training_step(self, batch, batch_idx):
        assert self.all_gather(batch).shape == (4, *batch.shape)
        assert not self.trainer.is_global_zero and self.trainer.world_size == 4
        assert signal.getsignal(signal.SIGTERM) == SIGTERM_HANDLER
        self.logger.experiment.add_scalar("x", 1.0, batch_idx)
        assert Path(self.trainer.log_dir).is_dir() and Path(self.logger.log_dir).is_dir()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        raise KeyError(self.trainer.callback_metrics["val/loss"])


MODELS = {
    "the Trainer": UsesItsTrainer,
    "max_epochs": with_schedule(
        lambda model, optimizer: OneCycleLR(optimizer, 0.1, epochs=model.trainer.max_epochs, steps_per_epoch=10)
    ),
    "a metric of the validation": with_schedule(lambda _, optimizer: ReduceLROnPlateau(optimizer), monitor="val/loss"),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_that_uses_parts_of_a_run_is_tried_without_error(model):
    trial, _ = start(model(), Data())
    assert trial.train()["seconds"] > 0


def test_fast_steps_are_tried_for_a_second(monkeypatch):
    clock = SimpleNamespace(perf_counter=count(0, 1 / 64).__next__)  # each step takes 1/64 s
    monkeypatch.setattr(training, "time", clock)
    model = Model()
    trial, _ = start(model, Data(), max_epochs=1_000, batch_size=2)
    trial.train()
    assert len(model.sizes) == 64 > STEPS and sum(trial._timer.seconds) == SECONDS


def test_a_data_set_without_a_length_is_tried_for_thirty_steps_and_others_for_no_more_than_those_of_the_run():
    trial, _ = start(BoringModel(), DataLoader(Unsized(torch.randn(40, 32)), batch_size=2))
    trial.train()
    assert len(trial._timer.seconds) == STEPS
    # A schedule of the learning rate may end with the run; a step after its end is an error.
    model = with_schedule(lambda _, optimizer: OneCycleLR(optimizer, 0.1, total_steps=15), interval="step")()
    trial, _ = start(model, Data(), batch_size=2)
    assert trial.train()["seconds"] > 0 and len(model.sizes) == 15


def test_each_step_gets_its_own_copy_of_the_batch_and_a_rank_without_samples_has_no_time():
    batch = {"x": torch.ones(2)}
    first, second = _Repeated(batch, 2)
    first["x"].zero_()
    assert second["x"].tolist() == batch["x"].tolist() == [1, 1]
    trial, _ = start(Model(), Data(), global_batch_size=1)
    assert trial.train() == {"seconds": None, "peak_bytes": 0}


def test_random_splits_are_equal_on_all_ranks():
    class Split(Data):
        def train_dataloader(self):
            first, _ = random_split(list(range(40)), [20, 20])
            return DataLoader(first, batch_size=2)

    fingerprints = []
    for _ in range(2):
        torch.seed()
        fingerprints.append(start(BoringModel(), Split())[1]["data"])
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize(
    ("fingerprints", "errors", "status", "text"),
    [
        ([{"samples": "10"}] * 2, {}, OK, "10 samples, the same on all ranks"),
        ([{}, {}], {}, OK, "readable; the data set has no fingerprint"),
        ([{"samples": "10"}, {"samples": "11"}], {}, FAIL, "samples: 10 on rank 0 (n1); 11 on rank 1 (n2)"),
        ([{"a": "1"}, {}], {}, FAIL, "a: 1 on rank 0 (n1); missing on rank 1 (n2)"),
        ([], {1: "FileNotFoundError: x\nmore"}, FAIL, "rank 1 (n2): FileNotFoundError: x"),
    ],
)
def test_the_data_of_all_ranks_is_compared(fingerprints, errors, status, text):
    check = check_data(fingerprints, errors, ["n1", "n2"])
    assert check.status == status and (check.details[0] if check.details else check.summary) == text
    assert bool(check.advice) is (status != OK)


WORKERS = [
    (2, 10**7, OK, ""),
    (3, 10**9, WARN, "has 6 loader processes on 4 cores"),
    (2, 7 * 10**6, WARN, "has 7 MB free, and the loader processes of this host need up to 8 MB"),
    (2, 3 * 10**6, FAIL, "has 3 MB free, and the loader processes of this host need up to 8 MB"),
]
"""Loader processes of a rank, free shared memory, and the status and details of the check."""


def run_check_workers(coordinator):
    checks, rank = [], coordinator.world.rank
    for workers, free, *_ in WORKERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            patch.setattr(training, "usable_cores", lambda: frozenset({2 * rank, 2 * rank + 1}))
            checks.append(check_workers(coordinator, workers, 4 * 10**6))
    return checks


def test_the_loader_processes_of_a_host_are_compared_with_its_cores_and_its_shared_memory(on_ranks):
    for checks in on_ranks(run_check_workers, 2):
        for check, (_, _, status, text) in zip(checks, WORKERS, strict=True):
            assert check.status == status and (text in check.details[0] if text else not check.details)
            assert bool(check.advice) is (status != OK)
        assert checks[1].advice == ["--data.num_workers 2, or more cores per rank"]


NO_GROUP = "Default process group has not been initialized, please make sure to call init_process_group."
STEP_RESULTS = [
    ((0.010, 0.011, 0.010), OK, None),
    ((0.010, 0.030, 0.010), WARN, "takes 30.0 ms, 3.0 times the median"),
    ((0.010, "CUDA out of memory", 0.010), FAIL, "RuntimeError: CUDA out of memory"),
    ((0.010, "wrong shape", 0.010), FAIL, "RuntimeError: wrong shape"),
    ((0.010, NO_GROUP, 0.010), WARN, "process group has not been initialized"),
    ((0.010, None, 0.010), OK, None),
    ((None, None, None), WARN, None),
]
"""The seconds or the error of each rank, and the status and details of the check."""


def run_check_steps(coordinator):
    def trial_of(result):
        def train():
            if isinstance(result, str):
                raise RuntimeError(result)
            return {"seconds": result, "peak_bytes": 10**9}

        return SimpleNamespace(train=train, device=torch.device("cpu"))

    return [check_steps(coordinator, trial_of(results[coordinator.world.rank])) for results, *_ in STEP_RESULTS]


def test_slow_and_failing_ranks_are_named(on_ranks):
    for checks in on_ranks(run_check_steps, 3):
        for check, (_, status, text) in zip(checks, STEP_RESULTS, strict=True):
            assert check.status == status
            assert not check.details if text is None else check.details[0].startswith("rank 1 ")
            assert text is None or text in check.details[0]
            assert status != FAIL or ("--batch_size" in check.advice[0]) is ("memory" in text)
