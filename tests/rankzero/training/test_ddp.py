import random
from datetime import timedelta
from types import SimpleNamespace

import numpy
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rankzero.distributed.coordination.process_group import destroy_process_group
from rankzero.distributed.environments.cluster import LaunchEnvironment
from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Share
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.ddp import DataParallel, strategy_for
from rankzero.training.fit_loop import install
from rankzero.training.metrics import epoch_averages
from rankzero.training.strategies import OneProcess
from running import world_of
from stock import SILENT


@pytest.mark.parametrize(
    ("requested", "unused"),
    [
        *((name, False) for name in ("auto", "ddp", "DDP", "ddp_spawn", "ddp_find_unused_parameters_false")),
        *((name, True) for name in ("ddp_fork_find_unused_parameters_true", "ddp_find_unused_parameters_true")),
        (DDPStrategy(find_unused_parameters=True), True),
    ],
)
def test_world_size_selects_one_process_or_data_parallel_strategy(requested, unused):
    plan = SamplingPlan()
    for world, device in ((world_of("cpu"), "cpu"), (world_of("cuda", index=3), "cuda:3")):
        strategy = strategy_for(requested, world, None, plan)
        assert (type(strategy), strategy.root_device, strategy.plan) == (OneProcess, torch.device(device), plan)
    strategy = strategy_for(requested, world_of("cpu", size=2, backend="gloo"), "coordinator", plan)
    assert (type(strategy), strategy.plan, strategy.coordinator) == (DataParallel, plan, "coordinator")
    assert strategy._ddp_kwargs == {"find_unused_parameters": unused} and strategy.process_group_backend == "gloo"


def test_a_fast_run_has_gradients_in_the_memory_that_is_reduced_unless_the_user_sets_it():
    world, plan = world_of("cpu", size=2, backend="gloo"), SamplingPlan()
    user_set = DDPStrategy(gradient_as_bucket_view=False)
    for requested, expected in (("ddp", True), (DDPStrategy(), True), (user_set, False)):
        assert strategy_for(requested, world, None, plan, True)._ddp_kwargs["gradient_as_bucket_view"] is expected
    assert type(strategy_for("ddp", world_of("cpu"), None, plan, True)) is OneProcess


def test_ddp_on_one_process_creates_the_group_that_a_distributed_sampler_reads():
    strategy = strategy_for("ddp", world_of("cpu"), None, SamplingPlan())
    strategy.accelerator = CPUAccelerator()
    strategy.setup_environment()
    try:
        assert DistributedSampler(range(4)).num_replicas == 1
    finally:
        destroy_process_group(after_error=False)


def test_settings_of_a_ddp_strategy_object_are_kept():
    settings = {"ddp_comm_state": "state", "ddp_comm_hook": repr, "ddp_comm_wrapper": print, "bucket_cap_mb": 7}
    settings |= {"timeout": timedelta(seconds=5), "precision_plugin": HalfPrecision("bf16-true")}
    requested = DDPStrategy(gradient_as_bucket_view=True, **settings)
    single, strategy = (strategy_for(requested, world_of("cpu", size=size), None, SamplingPlan()) for size in (1, 2))
    assert (strategy._ddp_comm_state, strategy._ddp_comm_hook, strategy._ddp_comm_wrapper) == ("state", repr, print)
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": True, "bucket_cap_mb": 7}
    assert strategy._timeout == timedelta(seconds=5)
    assert single.precision_plugin is strategy.precision_plugin is settings["precision_plugin"]


@pytest.mark.parametrize(
    "settings",
    [{"checkpoint_io": TorchCheckpointIO()}, {"start_method": "spawn"}, {"process_group_backend": "mpi"}],
    ids=lambda settings: next(iter(settings)),
)
def test_ddp_strategy_options_that_rankzero_decides_are_refused(settings):
    (name,) = settings
    with pytest.raises(RequestError) as refused:
        strategy_for(DDPStrategy(**settings), world_of("cpu", size=2, backend="gloo"), None, SamplingPlan())
    assert refused.value.instead == f"DDPStrategy without {name}"


@pytest.mark.parametrize(
    "requested",
    [
        *("fsdp", "single_device", "", None, 3),
        *(type("DDPSubclass", (DDPStrategy,), {})(), SingleDeviceStrategy(), FSDPStrategy()),
        DDPStrategy(model_averaging_period=2),
    ],
    ids=lambda requested: requested if isinstance(requested, str) else type(requested).__name__,
)
def test_unsupported_strategy_is_refused(requested):
    with pytest.raises(RequestError) as refused:
        strategy_for(requested, world_of("cpu", size=2), None, SamplingPlan())
    assert refused.value.asked == f"--trainer.strategy {requested}"
    assert "supports Lightning's DDPStrategy without model averaging" in str(refused.value)
    assert refused.value.instead == "--trainer.strategy auto or ddp, or ddp_find_unused_parameters_true"


def test_step_with_an_empty_rank_reduces_nothing_and_refuses_all_gather():
    strategy = DataParallel(SamplingPlan(), None)
    strategy.share = Share(1, 1, 2.0, 2.0, True)
    value = torch.tensor(4.0)
    message = r"in a step in which a rank has no sample would wait forever. DataLoader\(drop_last=True\), or a --global"

    def step(batch):
        assert strategy.reduce(value) is value and strategy.reduce(value, reduce_op="sum") is value
        with pytest.raises(RuntimeError, match=message):
            strategy.all_gather(value)
        raise LookupError(batch)

    with pytest.raises(LookupError, match="the batch"):
        strategy._run_local_step(step, "the batch")
    assert not strategy._skips_collectives


class Net(LightningModule):
    """Module that learns the sum of its inputs, optionally with one layer whose training begins in the second epoch."""

    def __init__(self, freezes=False):
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(2, 1).double()
        self.late = torch.nn.Linear(2, 1).double()
        self.unused = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.late.requires_grad_(not freezes)
        self.freezes, self.stepped = freezes, []

    def setup(self, stage):
        self.random_numbers = torch.rand(1).item(), random.random(), numpy.random.rand()

    def loss(self, batch):
        return (self.layer(batch[0]) + self.late(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("synced", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        self.log("stepped", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:  # a step in which each rank has a sample
            self.stepped.append(self.trainer.callback_metrics["stepped"].item())

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), batch_size=len(batch[0]))

    def on_train_epoch_start(self):
        if self.freezes and self.current_epoch == 1:
            self.late.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.late.parameters()]})

    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.05)


class Normalized(Net):
    """`Net` with batch norm, and optionally with another buffer."""

    def __init__(self, has_other_buffer):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2).double()
        if has_other_buffer:
            self.register_buffer("other", torch.zeros(1))

    def loss(self, batch):
        return super().loss([self.norm(batch[0])])


def samples(count):
    numbers = torch.arange(1.0, 1 + count).double() / count
    return DataLoader(TensorDataset(torch.stack((numbers, numbers.square()), 1)), batch_size=4)


def train(coordinator, count, freezes=False, module=None, is_fast=False):
    """Trains in steps of four samples; returns the weights, metrics and random numbers of a rank."""
    world = coordinator.world
    plan = SamplingPlan(world.rank, world.size, global_batch_size=4)
    if world.size == 1:
        strategy = OneProcess(plan, device="cpu")
    else:
        strategy = DataParallel(plan, coordinator, is_fast, process_group_backend="gloo")
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "devices": 1, "use_distributed_sampler": False, **SILENT}
    trainer = Trainer(strategy=strategy, plugins=[LaunchEnvironment(world)], **settings)
    trainer.callbacks.insert(0, install(trainer, plan))
    epoch_averages.install(trainer)
    module = module or Net(freezes)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(world.rank)
    trainer.fit(module, samples(count), samples(5))
    return SimpleNamespace(
        weights=[parameter.tolist() for parameter in module.parameters()],
        metrics={name: trainer.callback_metrics[name].item() for name in ("loss", "synced", "val")},
        random_numbers=module.random_numbers,
        stepped=module.stepped,
        steps=trainer.global_step,
        unused_has_no_gradient=module.unused.grad is None,
    )


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("world_size", "count", "freezes"), [(2, 9, False), (3, 7, True)])
def test_training_on_several_ranks_equals_training_on_one_rank(on_ranks, world_size, count, freezes):
    (single_rank,) = on_ranks(train, 1, count, freezes)
    ranks = on_ranks(train, world_size, count, freezes)
    for rank in ranks:
        for value, expected in zip(rank.weights, single_rank.weights, strict=True):
            assert torch.allclose(torch.tensor(value), torch.tensor(expected), rtol=1e-9, atol=0)
        assert rank.weights == ranks[0].weights, "ranks have different weights"
        assert rank.steps == single_rank.steps == 2 * -(-count // 4) and rank.unused_has_no_gradient
        assert rank.random_numbers == single_rank.random_numbers, "a rank has other generators than rank zero"
        assert rank.stepped == pytest.approx(single_rank.stepped, rel=1e-6) and len(rank.stepped) == 2
        assert rank.metrics == pytest.approx(single_rank.metrics, rel=1e-6)


def test_module_is_wrapped_again_while_the_device_is_idle(monkeypatch):
    strategy = DataParallel(SamplingPlan(), None, parallel_devices=[torch.device("cuda", 1)])
    module, events = torch.nn.Linear(2, 1), []
    strategy._lightning_module, strategy._synchronized_ids = module, set()
    strategy.model = DistributedDataParallel.__new__(DistributedDataParallel)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"{device} is idle"))
    monkeypatch.setattr(DataParallel, "configure_ddp", lambda self: events.append("wrap"))
    strategy.synchronize_new_parameters()
    assert events == ["cuda:1 is idle", "wrap", "cuda:1 is idle"] and strategy.model is module


def train_normalized(coordinator, has_other_buffer, is_fast):
    """Returns the result of a rank's training with batch norm, and the steps in which buffers were broadcast."""
    steps, module, sync = [], Normalized(has_other_buffer), DistributedDataParallel._sync_buffers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DistributedDataParallel, "_sync_buffers", lambda model: steps.append(module.global_step) or sync(model)
        )
        result = train(coordinator, 12, module=module, is_fast=is_fast)
    return SimpleNamespace(**vars(result), means=module.norm.running_mean.tolist(), broadcasts=steps)


@pytest.mark.xdist_group("ranks")
def test_batch_norm_is_broadcast_only_where_it_is_read_and_ends_with_the_same_values(on_ranks):
    expected = on_ranks(train_normalized, 2, False, False)
    for rank in on_ranks(train_normalized, 2, False, True):
        assert (rank.weights, rank.metrics, rank.means) == (expected[0].weights, expected[0].metrics, expected[0].means)
        assert rank.broadcasts == [0, 3, 3, 6, 6]  # before and after each epoch, and at the end
    assert expected[0].broadcasts == [0, 1, 2, 3, 3, 4, 5, 6]
    assert on_ranks(train_normalized, 2, True, True)[0].broadcasts == expected[0].broadcasts


def collective_results(coordinator):
    rank = coordinator.world.rank
    strategy = DataParallel(SamplingPlan(), coordinator, parallel_devices=[torch.device("cpu")])
    values = {}
    gathered = strategy.gather({"tensor": torch.ones(2, requires_grad=True) * rank, "none": None})
    values["gather"] = [(entry["tensor"].tolist(), entry["tensor"].requires_grad, entry["none"]) for entry in gathered]
    values["sum_over_ranks"] = strategy.sum_over_ranks([rank, 2**64 - 1, 2**63]), strategy.sum_over_ranks([])
    tensor = torch.tensor([1.0, -1.0]) * (rank + 1)
    strategy.sum_in_place(tensor)
    values["sum_in_place"] = tensor.tolist()
    strategy._metric_weight = (0.5, 1.5)[rank]
    for operation in ("mean", "avg", "sum"):
        values[f"reduce {operation}"] = strategy.reduce(torch.tensor(2.0 + rank), reduce_op=operation).item()
    values["all_gather"] = strategy.all_gather(torch.tensor([float(rank)])).tolist()
    return values


@pytest.mark.xdist_group("ranks")
def test_collectives_of_two_ranks_return_expected_values(on_ranks):
    for values in on_ranks(collective_results, 2):
        assert values == {
            "gather": [([0.0, 0.0], False, None), ([1.0, 1.0], False, None)],
            "sum_over_ranks": ([1, 2**64 - 2, 0], []),
            "sum_in_place": [3.0, -3.0],
            **dict.fromkeys(("reduce mean", "reduce avg"), (2.0 * 0.5 + 3.0 * 1.5) / 2),
            "reduce sum": 5.0,
            "all_gather": [[0.0], [1.0]],
        }
