import json

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rankzero.sampling.batch_sampler import ElasticBatchSampler, Position
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.callbacks.sample_ledger import SampleLedger, SamplesDifferError
from rankzero.training.strategies import OneProcess
from running import fit_in_process, train_in_process

TOY = ("--model", "MLP", "--data", "Toy", "--save_every", "10steps")


class SampleStream(IterableDataset):
    def __iter__(self):
        return iter(torch.rand(4, 32))


class Net(BoringModel):
    """Module that trains on 29 samples, or on the given loaders."""

    def __init__(self, *loaders, **settings):
        super().__init__()
        self.loaders = loaders or [self.loader(**settings)]

    @staticmethod
    def loader(count=29, **settings):
        return DataLoader(TensorDataset(torch.rand(count, 32)), **{"batch_size": 8, "shuffle": True, **settings})

    def training_step(self, batch, batch_idx):
        parts = [part[0] if isinstance(part, list) else part for part in (batch if len(self.loaders) > 1 else [batch])]
        return self.step(parts[0])

    def train_dataloader(self):
        return list(self.loaders) if len(self.loaders) > 1 else self.loaders[0]


def train(model=None, plan=None, save=None, **settings):
    plan = plan or SamplingPlan()
    ledger, settings = SampleLedger(plan), {"limit_val_batches": 0, "max_epochs": 2, **settings}
    train_in_process(ledger, *filter(None, [save]), model=model or Net(), plan=plan, **settings)
    return ledger


def test_ledger_has_a_line_for_each_epoch():
    assert train().entries == [f"epoch {number}: 29 of 29 samples, each once" for number in (1, 2)]


def test_samples_of_a_dropped_last_batch_count_as_unused():
    assert train(Net(drop_last=True), max_epochs=1).entries == ["epoch 1: 24 of 29 samples, each once"]


@pytest.mark.parametrize(
    ("settings", "entry"),
    [
        ({"max_steps": 6}, "epoch 2: 16 of 29 samples, each once so far"),
        ({"limit_train_batches": 2, "max_epochs": 1}, "epoch 1: 16 of 29 samples, each once"),
    ],
)
def test_ledger_of_an_epoch_that_ends_early_states_the_number_of_used_samples(settings, entry):
    ledger = train(**settings)
    assert ledger.entries[-1] == entry
    checkpoint = {}
    ledger.on_save_checkpoint(trainer_of(ledger.plan), BoringModel(), checkpoint)
    assert (entry in checkpoint["ledger"]["statements"]) == (not entry.endswith("so far"))


def test_accumulated_micro_batches_are_counted():
    plan = SamplingPlan(global_batch_size=24, max_device_batch_size=5)
    assert train(plan=plan, max_epochs=1).entries == ["epoch 1: 29 of 29 samples, each once"]
    assert plan.only_order.micro_batches == 5


@pytest.mark.filterwarnings(
    "ignore:.*does not guarantee that each sample", "ignore:.*num_workers", "ignore:.*Total length"
)
@pytest.mark.parametrize(
    "loaders",
    [(Net.loader(), Net.loader(count=16)), (DataLoader(SampleStream(), batch_size=2),)],
    ids=["two", "a stream"],
)
def test_ledger_is_empty_for_several_loaders_or_an_unmanaged_order(loaders):
    ledger = train(Net(*loaders), max_epochs=1)
    assert ledger.entries == []


@pytest.mark.parametrize("fast", [True, False])
def test_long_epoch_is_counted_before_it_ends(fast, monkeypatch):
    monkeypatch.setattr("rankzero.sampling.batch_sampler.MANY_IN_FLIGHT", 7)
    plan, in_flight_counts = SamplingPlan(), []

    class InFlight(Callback):
        def on_train_batch_end(self, *arguments):
            in_flight_counts.append(len(plan.only_order.in_flight))

    profiler = None if fast else "simple"  # with this profiler, Lightning's own loop trains
    ledger = train(Net(count=99, batch_size=2), plan, InFlight(), profiler=profiler)
    assert ledger.entries == [f"epoch {number}: 99 of 99 samples, each once" for number in (1, 2)]
    assert 7 <= max(in_flight_counts) <= 9 and len(in_flight_counts) == 100


def test_samples_of_a_batch_that_a_hook_skips_count_as_unused():
    class SkippingModel(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    assert train(SkippingModel(), max_epochs=1).entries == ["epoch 1: 16 of 29 samples, each once"]


@pytest.mark.parametrize("error", ["a sample twice", "a sample left out", "a batch twice"])
def test_epoch_that_repeats_or_omits_a_sample_raises_an_error(monkeypatch, error):
    batches = ElasticBatchSampler._batches

    def altered_batches(self, in_flight):
        for number, batch in enumerate(batches(self, in_flight)):
            if number == 2:
                in_flight[-1] = {
                    "a sample twice": torch.cat([torch.from_numpy(batch[:-1]), torch.from_numpy(batch[:1])]).numpy(),
                    "a sample left out": batch[1:],
                    "a batch twice": batch.repeat(2),
                }[error]
            yield batch

    monkeypatch.setattr(ElasticBatchSampler, "_batches", altered_batches)
    drawn = {"a sample twice": 29, "a sample left out": 28, "a batch twice": 37}[error]
    message = f"epoch 1: 29 of 29 samples should have been used, each once, but {drawn} were drawn, and not those"
    with pytest.raises(SamplesDifferError, match=message):
        train()


def trainer_of(plan):
    return Trainer(strategy=OneProcess(plan, device="cpu"), accelerator="cpu", logger=False, enable_checkpointing=False)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_saved_ledger_is_resumed_on_any_number_of_ranks(world):
    """Rank zero continues with the sums of all ranks, the other ranks with zeros."""
    saved, checkpoint = train(max_steps=6), {}
    saved.on_save_checkpoint(trainer_of(saved.plan), BoringModel(), checkpoint)
    content = json.loads(json.dumps(checkpoint))
    assert content["ledger"]["sums"][0] == 16 and content["ledger"]["statements"] == saved.entries[:1]
    sums = []
    for rank in range(world):
        plan = SamplingPlan(rank, world)
        ledger, saved_again = SampleLedger(plan), {}
        ledger.on_load_checkpoint(trainer_of(plan), BoringModel(), content)
        ledger.on_save_checkpoint(trainer_of(plan), BoringModel(), saved_again)
        assert ledger.entries == saved.entries[:1]
        sums.append(saved_again["ledger"]["sums"])
    assert sums == [content["ledger"]["sums"]] + [[0, 0, 0, 0]] * (world - 1)


class Save(Callback):
    def __init__(self, file):
        self.file = file

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.file)


@pytest.mark.parametrize("has_ledger", [False, True])
def test_resumed_epoch_is_stated_as_one_epoch(tmp_path, has_ledger):
    """Without a saved ledger, the samples before the checkpoint are assumed to have been used once."""
    file = tmp_path / "x.ckpt"
    train(save=Save(file), max_steps=6)
    if not has_ledger:
        torch.save({**torch.load(file), "ledger": None}, file)
    plan = SamplingPlan()
    plan.start_positions = [Position(1, 2, 16)]
    ledger = train(plan=plan, resume=file, max_epochs=3)
    epochs = (1, 2, 3) if has_ledger else (2, 3)
    assert ledger.entries == [f"epoch {number}: 29 of 29 samples, each once" for number in epochs]


def test_epoch_restarted_after_a_resume_counts_from_zero(tmp_path):
    train(save=Save(tmp_path / "x.ckpt"), max_steps=6)
    plan = SamplingPlan()
    plan.start_positions = [Position(1)]
    ledger = train(plan=plan, resume=tmp_path / "x.ckpt", max_epochs=3)
    assert ledger.entries == [f"epoch {number}: 29 of 29 samples, each once" for number in (1, 2, 3)]


def test_saved_ledger_of_different_samples_raises_an_error(tmp_path):
    file = tmp_path / "x.ckpt"
    train(save=Save(file), max_steps=6)
    content = torch.load(file)
    content["ledger"]["sums"][1] += 1
    torch.save(content, file)
    plan = SamplingPlan()
    plan.start_positions = [Position(1, 2, 16)]
    with pytest.raises(SamplesDifferError, match="epoch 2: 29 of 29 samples should have been used"):
        train(plan=plan, resume=file, max_epochs=3)


@pytest.mark.parametrize("checkpoint", [{}, {"ledger": None}])
def test_a_checkpoint_without_a_ledger_changes_nothing(checkpoint):
    ledger = SampleLedger(plan := SamplingPlan())
    ledger.on_load_checkpoint(trainer_of(plan), BoringModel(), checkpoint)
    assert ledger.entries == []


def test_run_with_an_incorrect_ledger_fails(cwd, monkeypatch):
    batches = ElasticBatchSampler._batches

    def repeat_one_sample(self, in_flight):
        first = None
        for number, batch in enumerate(batches(self, in_flight)):
            first = in_flight[-1] if number == 0 else first
            if number == 3:
                in_flight[-1] = first
            yield batch

    monkeypatch.setattr(ElasticBatchSampler, "_batches", repeat_one_sample)
    with pytest.raises(SamplesDifferError, match="epoch 1: 2,048 of 2,048 samples should have been used"):
        fit_in_process(*TOY, "--epochs", "1", "--run", "x")
    assert json.loads((cwd / "runs/x/summary.json").read_text())["status"] == "failed"
