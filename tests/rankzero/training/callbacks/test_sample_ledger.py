import json

import pytest
import torch
from boring_models import ShuffledNet
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from rankzero.sampling.batch_sampler import ElasticBatchSampler, Position
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.callbacks.sample_ledger import SampleLedger, SamplesDifferError
from rankzero.training.strategies import OneProcess
from running import train_in_process
from stock import SILENT, saves_to


def train(model=None, plan=None, save=None, **settings):
    plan = plan or SamplingPlan()
    ledger, settings = SampleLedger(plan), {"limit_val_batches": 0, "max_epochs": 2, **settings}
    train_in_process(ledger, *filter(None, [save]), model=model or ShuffledNet(), plan=plan, **settings)
    return ledger


class SkipsThirdBatch(ShuffledNet):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


IN_MICRO_BATCHES = SamplingPlan(global_batch_size=24, max_device_batch_size=5)


@pytest.mark.parametrize(
    ("settings", "micro_batches", "entry"),
    [
        ({"max_epochs": 2}, 1, "epoch 2: 29 of 29 samples, each once"),
        ({"model": ShuffledNet(drop_last=True)}, 1, "epoch 2: 24 of 29 samples, each once"),
        ({"max_steps": 6}, 1, "epoch 2: 16 of 29 samples, each once so far"),
        ({"limit_train_batches": 2, "max_epochs": 1}, 1, "epoch 1: 16 of 29 samples, each once"),
        ({"model": SkipsThirdBatch(), "max_epochs": 1}, 1, "epoch 1: 16 of 29 samples, each once"),
        ({"plan": IN_MICRO_BATCHES}, 5, "epoch 2: 29 of 29 samples, each once"),
    ],
)
def test_ledger_has_a_line_for_each_epoch_with_the_number_of_used_samples(settings, micro_batches, entry):
    ledger = train(**settings)
    assert ledger.plan.only_order.micro_batches == micro_batches
    assert ledger.entries[-1] == entry and len(ledger.entries) == settings.get("max_epochs", 2)
    checkpoint = {}
    ledger.on_save_checkpoint(trainer_of(ledger.plan), BoringModel(), checkpoint)
    assert (entry in checkpoint["ledger"]["statements"]) == (not entry.endswith("so far"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loaders", [(ShuffledNet.loader(), ShuffledNet.loader(count=16)), (ShuffledNet.stream(),)], ids=["two", "a stream"]
)
def test_ledger_is_empty_for_several_loaders_or_an_unmanaged_order(loaders):
    assert train(ShuffledNet(*loaders), max_epochs=1).entries == []


@pytest.mark.parametrize("fast", [True, False])
def test_long_epoch_is_counted_before_it_ends(fast, monkeypatch):
    monkeypatch.setattr("rankzero.sampling.batch_sampler.MANY_IN_FLIGHT", 7)
    plan, in_flight_counts = SamplingPlan(), []
    counter = LambdaCallback(on_train_batch_end=lambda *_: in_flight_counts.append(len(plan.only_order.in_flight)))
    profiler = None if fast else "simple"  # with this profiler, Lightning's own loop trains
    ledger = train(ShuffledNet(count=99, batch_size=2), plan, counter, profiler=profiler)
    assert ledger.entries == [f"epoch {number}: 99 of 99 samples, each once" for number in (1, 2)]
    assert 7 <= max(in_flight_counts) <= 9 and len(in_flight_counts) == 100


@pytest.mark.parametrize(("used", "drawn"), [([*range(7), 0], 29), ([*range(1, 8)], 28), ([*range(8)] * 2, 37)])
def test_epoch_that_repeats_or_omits_a_sample_raises_an_error(monkeypatch, used, drawn):
    batches = ElasticBatchSampler._batches

    def altered_batches(self, in_flight):
        for number, batch in enumerate(batches(self, in_flight)):
            if number == 2:
                in_flight[-1] = batch[used]
            yield batch

    monkeypatch.setattr(ElasticBatchSampler, "_batches", altered_batches)
    message = f"epoch 1: 29 of 29 samples should have been used, each once, but {drawn} were drawn, and not those"
    with pytest.raises(SamplesDifferError, match=message):
        train()


def trainer_of(plan):
    return Trainer(strategy=OneProcess(plan, device="cpu"), **SILENT)


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


def resume(folder, position, **changes):
    """Trains six steps and saves, changes the checkpoint, and trains from a position; returns the ledger."""
    file, plan = folder / "x.ckpt", SamplingPlan()
    train(save=saves_to(file), max_steps=6)
    torch.save({**torch.load(file), **changes}, file)
    plan.start_positions = [position]
    return train(plan=plan, resume=file, max_epochs=3)


@pytest.mark.parametrize(
    "position", [Position(1, 2, 16), Position(1)], ids=["in an epoch", "at the start of the epoch"]
)
def test_resumed_epoch_is_stated_as_one_epoch(tmp_path, position):
    entries = resume(tmp_path, position).entries
    assert entries == [f"epoch {number}: 29 of 29 samples, each once" for number in (1, 2, 3)]


def test_saved_ledger_of_different_samples_raises_an_error(tmp_path):
    train(save=saves_to(tmp_path / "saved.ckpt"), max_steps=6)
    ledger = torch.load(tmp_path / "saved.ckpt")["ledger"]
    ledger["sums"][1] += 1
    with pytest.raises(SamplesDifferError, match="epoch 2: 29 of 29 samples should have been used"):
        resume(tmp_path, Position(1, 2, 16), ledger=ledger)
