"""Collectives of a run on many ranks, counted on rank zero; the other ranks are torch's `fake` process group."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import ANY

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rankzero
from data_modules import Toy
from lightning_modules import MLP
from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.coordination.session import Session
from rankzero.distributed.environments.launch import RequestedWorld
from rankzero.distributed.world import World
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.callbacks import sample_ledger
from rankzero.training.ddp import DataParallel
from rankzero.training.hooks import LoopCallback
from running import small_figures, world_of

SIZES = (8, 512)
DDP = "gradients of DDP"


class Collectives(TorchDispatchMode):
    """Counts collectives by name, and the bytes of their tensors."""

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.add(func.name().removeprefix("c10d::").rstrip("_"), *tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def add(self, name, *values):
        self.counts[name] += 1
        self.bytes += sum(value.nbytes for value in values if isinstance(value, Tensor))

    def average(self, state, bucket):
        """Communication hook of DDP: the fake process group returns no averaged gradients."""
        self.add(DDP, bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


class Steps(LoopCallback):
    """Records the collectives from one safe point to the next, by step."""

    def __init__(self, collectives):
        self.collectives, self.found = collectives, {}

    def on_safe_point(self, trainer):
        self.found[trainer.global_step] = self.collectives.counts, self.collectives.bytes
        self.collectives.counts, self.collectives.bytes = Counter(), 0


def fit(root, size, monkeypatch):
    """Trains 16 steps as rank zero of `size` ranks, of which no other exists; returns the collectives by step."""
    requested = RequestedWorld()
    coordinator = Coordinator(World(), requested)
    coordinator.world = world_of("cpu", size, nodes=size // 8, devices=8)
    coordinator._exchange = SimpleNamespace(decide=lambda value, choose, *_, **__: choose([value] * size))
    coordinator.init_process_group = lambda *_: (
        distributed.is_initialized()
        or distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    )
    collectives, configure_ddp = Collectives(), DDPStrategy.configure_ddp

    def configure(strategy):
        configure_ddp(strategy)
        strategy.model.register_comm_hook(None, collectives.average)

    with monkeypatch.context() as patch, coordinator:
        patch.setattr(DDPStrategy, "configure_ddp", configure)
        patch.setattr(sample_ledger, "expected_sums", lambda *_: ANY)  # the other ranks read no samples
        patch.setattr(Session, "current", Session(requested, coordinator, "x"))
        with collectives, small_figures():
            steps = Steps(collectives)
            trainer = rankzero.Trainer(
                name=f"x{size}", root=root, accelerator="cpu", max_epochs=1, batch_size=1, log_every_n_steps=5,
                save_every="7steps", preflight="off", num_sanity_val_steps=0, quiet=True, callbacks=[steps],
            )  # fmt: skip
            trainer.fit(MLP(in_features=20, out_features=1), datamodule=Toy(count=16 * size))
    return steps.found


def test_a_value_that_is_averaged_in_a_step_needs_no_barrier_which_would_wait_for_the_gpu():
    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        with Collectives() as collectives:
            assert DataParallel(SamplingPlan(), None).reduce(torch.tensor(8.0)) == 1
    finally:
        distributed.destroy_process_group()
    assert collectives.counts == {"allreduce": 1}


def test_the_number_of_collectives_does_not_grow_with_the_world(script_folder, monkeypatch):
    by_size = {size: fit(script_folder, size, monkeypatch) for size in SIZES}
    few, many = ({step: counts for step, (counts, _) in by_size[size].items()} for size in SIZES)
    assert few == many
    assert sorted(few) == list(range(17))
    assert [few[step] for step in (6, 7, 9, 11, 12, 13, 14)] == [Counter({DDP: 1})] * 7
    assert few[10] == Counter({DDP: 1, "_allgather_base": 1})  # a logging step
    assert few[8]["gather"] == 1  # a save
    for size in SIZES:
        assert by_size[size][6][1] == 4 * (20 + 1)  # bytes of the gradients
        assert by_size[size][10][1] / size < 200  # a row of each rank
        assert by_size[size][8][1] / size < 30_000  # the generators of each rank
