import time

import psutil
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from stock import SIZE, Loaders, Net, train
from torch.utils.data import DataLoader, TensorDataset

from rankzero.sampling.batch_sampler import ElasticBatchSampler
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import install
from rankzero.training.strategies import OneProcess
from running import restore_process_state


class Tagged(DataLoader):
    """DataLoader with additional attributes and methods."""

    tag, count = "of the class", 0

    def __init__(self, *arguments, tag="given", **settings):
        super().__init__(*arguments, **settings)
        self.tag = tag

    def counted(self):
        self.count += 1
        return self.count, self.tag, len(self.dataset), self.num_workers


class AttributeRecorder(BoringModel):
    """Model that records the attributes of its training loader."""

    def on_train_batch_start(self, batch, batch_idx):
        loader = self.trainer.train_dataloader
        self.attributes = (
            *(isinstance(loader, DataLoader), isinstance(loader, Tagged), len(loader)),
            *(
                loader.batch_size,
                loader.drop_last,
                loader.num_workers,
                loader.pin_memory,
                loader.multiprocessing_context,
            ),
            *(len(loader.dataset), loader.collate_fn, loader.worker_init_fn, getattr(loader, "missing", "no such")),
            loader.counted() if isinstance(loader, Tagged) else None,
        )


@pytest.mark.parametrize("loader_class", [DataLoader, Tagged])
def test_a_module_sees_the_same_loader_attributes_as_in_stock_lightning(loader_class):
    def observe(with_rankzero):
        module, loader = AttributeRecorder(), loader_class(torch.rand(12, 32), batch_size=4, shuffle=True)
        plan = SamplingPlan()
        settings = {"strategy": OneProcess(plan, device="cpu")} if with_rankzero else {}
        with restore_process_state():
            trainer = Trainer(
                accelerator="cpu",
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_val_batches=0,
                **settings,
            )
            if with_rankzero:
                trainer.callbacks.insert(0, install(trainer, plan))
            trainer.fit(module, loader)
        assert isinstance(trainer.train_dataloader, ManagedLoader) == with_rankzero
        return module.attributes, getattr(loader, "count", None)

    assert observe(True) == observe(False)


def test_a_loader_can_be_wrapped_again_after_training():
    plan = SamplingPlan(seed=1)
    loader = Tagged(TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True)
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


class ProcessCounter(Callback):
    """Callback that records the number of loader processes."""

    def __init__(self, fails_in=None):
        self.counts, self.fails_in = [], fails_in

    def record(self, hook):
        self.counts.append((hook, len(living_children())))

    def on_train_epoch_start(self, trainer, module):
        self.record("epoch start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.record("second batch")
        if (trainer.current_epoch, batch_idx) == self.fails_in:
            raise ZeroDivisionError

    def on_validation_epoch_start(self, trainer, module):
        self.record("validation start")

    def on_validation_epoch_end(self, trainer, module):
        self.record("validation end")

    def on_train_epoch_end(self, trainer, module):
        self.record("epoch end")


def living_children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def children_of(with_rankzero, persistent, fails_in=None):
    counter = ProcessCounter(fails_in)
    settings = {"num_workers": 2, "persistent_workers": persistent}
    before = len(living_children())
    try:
        train(
            with_rankzero,
            Net(),
            [counter],
            Loaders(**settings),
            Loaders(2 * SIZE, num_workers=1, persistent_workers=persistent),
            max_epochs=4,
            val_check_interval=0.5,
        )
    except ZeroDivisionError:
        assert fails_in
    deadline = time.monotonic() + 5
    while len(living_children()) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return [(hook, count - before) for hook, count in counter.counts], len(living_children()) - before


@pytest.mark.parametrize("fails_in", [None, (1, 2)])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_number_of_loader_processes_is_the_same_as_in_stock_lightning(persistent, fails_in):
    (counts, remaining), (stock_counts, _) = (
        children_of(with_rankzero, persistent, fails_in) for with_rankzero in (True, False)
    )
    assert counts == stock_counts and remaining == 0
