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
from running import as_before


class Tagged(DataLoader):
    """DataLoader with additional attributes and methods."""

    tag, count = "of the class", 0

    def __init__(self, *arguments, tag="given", **settings):
        super().__init__(*arguments, **settings)
        self.tag = tag

    def counted(self):
        self.count += 1
        return self.count, self.tag, len(self.dataset), self.num_workers


class Looks(BoringModel):
    """Model that records the attributes of its training loader."""

    def on_train_batch_start(self, batch, batch_idx):
        loader = self.trainer.train_dataloader
        self.seen = (
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


@pytest.mark.parametrize("kind", [DataLoader, Tagged])
def test_a_module_sees_the_same_loader_attributes_as_in_stock_lightning(kind):
    def observe(ours):
        module, loader = Looks(), kind(torch.rand(12, 32), batch_size=4, shuffle=True)
        plan = SamplingPlan()
        settings = {"strategy": OneProcess(plan, device="cpu")} if ours else {}
        with as_before():
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
            if ours:
                trainer.callbacks.insert(0, install(trainer, plan))
            trainer.fit(module, loader)
        assert isinstance(trainer.train_dataloader, ManagedLoader) == ours
        return module.seen, getattr(loader, "count", None)

    assert observe(True) == observe(False)


def test_a_loader_can_be_wrapped_again_after_training():
    plan = SamplingPlan(seed=1)
    loader = Tagged(TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True)
    once = plan.wrap(loader, training=True)
    list(once)
    again = plan.wrap(once, training=True)
    assert again.users_loader is loader
    assert sorted(torch.cat([batch[0] for batch in again]).tolist()) == list(range(12))


def test_a_batch_that_is_none_does_not_change_the_shares_of_other_batches():
    data = [torch.tensor(number) for number in range(10)]
    users = DataLoader(data, 4, collate_fn=lambda samples: None if 0 in samples else torch.stack(samples))
    loader = ManagedLoader(users, ElasticBatchSampler(10, 4), lambda value: value)
    shares = [loader.next_share().samples for batch in loader if batch is not None]
    assert shares == [4, 2]


class Children(Callback):
    """Callback that records the number of loader processes."""

    def __init__(self, fails_in=None):
        self.seen, self.fails_in = [], fails_in

    def note(self, place):
        self.seen.append((place, len(living_children())))

    def on_train_epoch_start(self, trainer, module):
        self.note("epoch start")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.note("second batch")
        if (trainer.current_epoch, batch_idx) == self.fails_in:
            raise ZeroDivisionError

    def on_validation_epoch_start(self, trainer, module):
        self.note("validation start")

    def on_validation_epoch_end(self, trainer, module):
        self.note("validation end")

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch end")


def living_children():
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def children_of(ours, persistent, fails_in=None):
    children = Children(fails_in)
    settings = {"num_workers": 2, "persistent_workers": persistent}
    before = len(living_children())
    try:
        train(
            ours,
            Net(),
            [children],
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
    return [(place, count - before) for place, count in children.seen], len(living_children()) - before


@pytest.mark.parametrize("fails_in", [None, (1, 2)])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_number_of_loader_processes_is_the_same_as_in_stock_lightning(persistent, fails_in):
    (ours, left), (stock, _) = (children_of(way, persistent, fails_in) for way in (True, False))
    assert ours == stock and left == 0
