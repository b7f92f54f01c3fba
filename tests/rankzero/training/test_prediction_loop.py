from itertools import chain

import pytest
import torch
from lightning.pytorch import Trainer as StockTrainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from rankzero import Trainer
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.prediction_loop import PredictionLoop
from rankzero.training.strategies import OneProcess
from running import restore_process_state
from stock import SILENT, Unsized, assert_equals_stock

DATA = TensorDataset(torch.arange(10.0)[:, None])


class Net(BoringModel):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return (batch[0] if isinstance(batch, list) else batch)[:, 0].tolist()


class Writer(BasePredictionWriter):
    def __init__(self, interval):
        super().__init__(interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((prediction, batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append((predictions, batch_indices))


class Positional(DataLoader):
    """Loader whose batch size is a positional argument, which Lightning cannot handle when it copies a loader."""

    def __init__(self, size):
        super().__init__(DATA, size, drop_last=True)


def predict(uses_rankzero, *loaders, interval="batch_and_epoch"):
    """Returns the predictions and the records of a writer, with Rankzero's loop or with Lightning's."""
    writer, settings = Writer(interval), {}
    with restore_process_state():
        if uses_rankzero:
            settings["strategy"] = OneProcess(SamplingPlan(), device="cpu")
        trainer = StockTrainer(callbacks=[writer], **SILENT, **settings)
        if uses_rankzero:
            trainer.predict_loop = PredictionLoop(trainer)
        predicted = trainer.predict(Net(), loaders[0] if len(loaders) == 1 else list(loaders))
        assert "_prepare_dataloader" not in vars(trainer._data_connector)  # Lightning's own is restored
    return predicted, writer.batches, writer.epochs


def predict_sizes(uses_rankzero, sizes, interval, **settings):
    return predict(uses_rankzero, *[DataLoader(DATA, batch_size=size, **settings) for size in sizes], interval=interval)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("sizes", [(4,), (10,), (5,), (1,), (4, 3)])
def test_predictions_and_sample_indices_equal_lightnings(sizes, interval):
    result = assert_equals_stock(predict_sizes, sizes, interval)
    assert predict_sizes(True, sizes, interval, drop_last=True) == result
    predicted = result[0] if len(sizes) == 1 else result[0][0]
    assert [*chain(*predicted)] == list(range(10))


@pytest.mark.parametrize(
    "loader",
    [
        *(DataLoader(DATA, 4, shuffle, drop_last=True) for shuffle in (False, True)),
        DataLoader(DATA, 4, drop_last=True, num_workers=1, collate_fn=lambda rows: torch.stack([x for (x,) in rows])),
        Positional(4),
    ],
)
def test_predictions_include_the_last_batch_of_a_loader_with_drop_last(loader):
    predicted, batches, _ = predict(True, loader)
    assert list(map(len, predicted)) == [4, 4, 2] and sorted([*chain(*predicted)]) == list(range(10))
    assert all(prediction == samples for prediction, samples, *_ in batches)
    assert loader.drop_last and len(loader) == 2  # the user's loader is unchanged


@pytest.mark.filterwarnings("ignore:.*decides the order of")
def test_custom_order_of_samples_and_sampler_of_a_batch_sampler_are_kept():
    assert predict(True, DataLoader(DATA, batch_sampler=[[3, 1], [2]]))[0] == [[3.0, 1.0], [2.0]]
    assert predict(True, DataLoader(DATA, 2, sampler=[3, 1, 2], drop_last=True))[0] == [[3.0, 1.0], [2.0]]
    predicted, batches, _ = predict(True, DataLoader(DATA, batch_sampler=BatchSampler([9, 7, 5], 2, drop_last=True)))
    assert predicted == [[9.0, 7.0], [5.0]] == [samples for _, samples, *_ in batches]
    own = type("Own", (BatchSampler,), {})(SequentialSampler(DATA), 4, True)
    assert [*chain(*predict(True, DataLoader(DATA, batch_sampler=own))[0])] == list(range(8))


@pytest.mark.filterwarnings("ignore:.*decides the order of")
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_sample_indices_of_a_user_sampler_equal_lightnings(interval):
    order = (9, 7, 5, 3, 1, 0)
    assert (*chain(*assert_equals_stock(predict_sizes, (4,), interval, sampler=order)[0]),) == order


@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_writer_receives_no_sample_indices_of_an_iterable_data_set(interval):
    stream = DataLoader(Unsized(DATA), batch_size=4)
    _, batches, epochs = assert_equals_stock(lambda ours: predict(ours, stream, interval=interval))
    assert all(indices == [] for _, indices, *_ in batches) and all(indices == [[]] for _, indices in epochs)


def test_trainer_uses_rankzeros_prediction_loop(script_folder):
    trainer = Trainer(**SILENT)
    assert type(trainer.predict_loop) is PredictionLoop
    with pytest.raises(TypeError):
        trainer.predict(Net(), 3)
    assert "_prepare_dataloader" not in vars(trainer._data_connector)
    assert sum(map(len, trainer.predict(Net(), DataLoader(DATA, 4, drop_last=True)))) == 10
