from contextlib import nullcontext
from functools import partial

import psutil
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.index_list import Indices
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from running import train_in_process
from stock import SIZE, Loaders, Net, train


class Tagged(DataLoader):
    tag, count = "of the class", 0

    def __init__(self, *arguments, tag="given", **settings):
        super().__init__(*arguments, **settings)
        self.tag = tag

    def counted(self):
        self.count += 1
        return self.count, self.tag, len(self.dataset), self.num_workers


NAMES = ("batch_size", "drop_last", "num_workers", "pin_memory", "multiprocessing_context", "collate_fn")


class AttributeRecorder(BoringModel):
    """Model that records the attributes of its training loader."""

    def on_train_batch_start(self, batch, batch_idx):
        loader = self.trainer.train_dataloader
        attributes = [getattr(loader, name, "no such") for name in (*NAMES, "worker_init_fn", "missing")]
        kinds = isinstance(loader, DataLoader), isinstance(loader, Tagged), len(loader), len(loader.dataset)
        self.attributes = kinds, attributes, loader.counted() if isinstance(loader, Tagged) else None


@pytest.mark.parametrize("loader_class", [DataLoader, Tagged])
def test_a_module_sees_the_same_loader_attributes_as_in_stock_lightning(loader_class):
    def observe(with_rankzero):
        module, loader = AttributeRecorder(), loader_class(torch.rand(12, 32), batch_size=4, shuffle=True)
        plan = SamplingPlan() if with_rankzero else None
        train_in_process(model=module, data=loader, plan=plan, max_epochs=1, limit_val_batches=0)
        assert isinstance(module.trainer.train_dataloader, ManagedLoader) == with_rankzero
        return module.attributes, getattr(loader, "count", None)

    assert observe(True) == observe(False)


def test_a_loader_can_be_wrapped_again_after_training():
    plan, loader = SamplingPlan(), Tagged(TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True)
    wrapped = plan.wrap(loader, training=True)
    list(wrapped)
    wrapped_again = plan.wrap(wrapped, training=True)
    assert wrapped_again.user_loader is loader
    assert sorted(torch.cat([batch[0] for batch in wrapped_again]).tolist()) == list(range(12))


def test_a_batch_that_is_none_does_not_change_the_shares_of_other_batches():
    data = [torch.tensor(number) for number in range(10)]
    user_loader = DataLoader(data, 4, collate_fn=lambda samples: None if 0 in samples else torch.stack(samples))
    loader = ManagedLoader(user_loader, ElasticBatchSampler(10, 4), lambda value: value)
    shares = [loader.next_share().samples for batch in loader if batch is not None]
    assert shares == [4, 2]


def stop_iteration(*_):
    next(iter([]))


@pytest.mark.parametrize("source", ["collate function", "data set", "collate function of a stream"])
@pytest.mark.filterwarnings("ignore:.*decides the order of")
def test_a_stop_iteration_of_user_code_is_an_error_and_does_not_end_the_epoch(source):
    class Data(torch.utils.data.IterableDataset if "stream" in source else torch.utils.data.Dataset):
        __len__ = lambda self: 8  # noqa: E731
        __iter__ = lambda self: iter(range(8))  # noqa: E731
        __getitem__ = stop_iteration if source == "data set" else lambda self, index: index

    collate = stop_iteration if "collate" in source else None
    loader = SamplingPlan().wrap(DataLoader(Data(), 4, collate_fn=collate), training=True)
    with pytest.raises(RuntimeError, match=f"the {source.split(' of')[0]} raised StopIteration"):
        if source == "data set":  # in a loader process
            loader._reader.dataset.__getitems__(Indices([1]))
        list(loader)


class ProcessCounter(Callback):
    """Callback that records the number of loader processes."""

    def __init__(self, fails_in=None):
        self.counts, self.fails_in = [], fails_in
        for hook in ("train_epoch_start", "validation_epoch_start", "validation_epoch_end", "train_epoch_end"):
            setattr(self, f"on_{hook}", partial(self.record, hook))

    def record(self, hook, *arguments):
        self.counts.append((hook, len(living_children())))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.record("second batch")
        if (trainer.current_epoch, batch_idx) == self.fails_in:
            raise ZeroDivisionError


def living_children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def children_of(with_rankzero, persistent, fails_in):
    counter, settings = ProcessCounter(fails_in), {"persistent_workers": persistent}
    before = living_children()
    loaders = Loaders(num_workers=2, **settings), Loaders(2 * SIZE, num_workers=1, **settings)
    with pytest.raises(ZeroDivisionError) if fails_in else nullcontext():
        train(with_rankzero, Net(), [counter], *loaders, max_epochs=3, val_check_interval=0.5)
    del loaders
    remaining = [child for child in living_children() if child not in before]
    psutil.wait_procs(remaining, timeout=None if with_rankzero else 5)
    return [(hook, count - len(before)) for hook, count in counter.counts]


@pytest.mark.parametrize(("persistent", "fails_in"), [(False, None), (True, None), (False, (1, 2)), (True, (1, 2))])
def test_the_number_of_loader_processes_is_the_same_as_in_stock_lightning(persistent, fails_in):
    counts = children_of(True, persistent, fails_in)
    assert counts == children_of(False, persistent, fails_in) and max(count for _, count in counts) > 0
