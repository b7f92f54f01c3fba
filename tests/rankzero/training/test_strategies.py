import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero.messages import RequestError, RunError
from rankzero.sampling.batch_sampler import EVEN_SHARE
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.hooks import LoopCallback
from rankzero.training.strategies import OneProcess
from running import train_in_process
from stock import SILENT, Loaders, ManualNet, Net, differences, train, with_methods

DATA = TensorDataset(torch.arange(9.0)[:, None])


def connected_strategy(plan=None, module=None, stage=RunningStage.TRAINING, **settings):
    strategy = OneProcess(plan or SamplingPlan(), device="cpu")
    trainer, module = Trainer(strategy=strategy, **SILENT, **settings), module or BoringModel()
    strategy.connect(module)
    module.trainer, trainer.state.stage, trainer.state.fn = trainer, stage, TrainerFn.FITTING
    return strategy


@pytest.mark.parametrize(
    ("stage", "loads_training", "is_training"),
    [
        (RunningStage.TRAINING, None, True),
        (RunningStage.TRAINING, False, False),  # a finder loads validation data in the training stage
        *((stage, None, False) for stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING)),
        (RunningStage.VALIDATING, True, True),
    ],
)
def test_stage_selects_the_training_or_evaluation_order_of_a_loader(stage, loads_training, is_training):
    strategy = connected_strategy(SamplingPlan(), stage=stage)
    strategy.plan.loads_training = loads_training
    assert isinstance(strategy.process_dataloader(DataLoader(DATA, batch_size=4, shuffle=True)), ManagedLoader)
    orders = len(strategy.plan.training_orders), len(strategy.plan.evaluation_orders)
    assert orders == ((1, 0) if is_training else (0, 1))
    assert strategy.lightning_module.trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize(
    ("owner", "hook", "copies"),
    [
        (None, "", True),
        ("module", "on_before_batch_transfer", False),
        ("data", "transfer_batch_to_device", False),
        ("data", "on_after_batch_transfer", True),
    ],
)
def test_loaders_copy_batches_to_the_gpu_unless_a_hook_expects_them_in_host_memory(monkeypatch, owner, hook, copies):
    strategy, read_for = connected_strategy(), []
    monkeypatch.setattr(ManagedLoader, "read_for", lambda self, *arguments: read_for.append(arguments))
    data = strategy.lightning_module.trainer.datamodule = LightningDataModule()
    if owner:
        monkeypatch.setattr(strategy.lightning_module if owner == "module" else data, hook, print)
    strategy.process_dataloader(DataLoader(DATA))
    assert read_for == []
    strategy._root_device = torch.device("cuda", 1)
    strategy.process_dataloader(DataLoader(DATA))
    strategy.lightning_module.conv = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    strategy.process_dataloader(DataLoader(DATA))
    assert read_for == [(torch.device("cuda", 1), copies, False), (torch.device("cuda", 1), copies, True)]


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([torch.ones(2)], 'returned a "weight" of shape (2,); return a number, or rename'),
        (["many"], "returned a \"weight\" 'many'; return a number, or rename"),
        *((weights, "with some losses only") for weights in ([3, None], [None, 3])),
    ],
)
def test_an_invalid_or_missing_weight_of_a_loss_is_an_error(weights, problem):
    def training_step(self, batch, batch_idx):
        weight = weights[batch_idx % len(weights)]
        return {"loss": Net.training_step(self, batch, batch_idx)} | ({} if weight is None else {"weight": weight})

    with pytest.raises(RunError, match=re.escape(problem)):
        train(True, with_methods("Weighted", training_step=training_step)())


@pytest.mark.parametrize("weight", [3, 0.1, torch.tensor(7), torch.tensor(0.1, dtype=torch.bfloat16)])
@pytest.mark.parametrize("batches", [1, 3])
def test_losses_weighted_by_their_samples_train_as_without_weights(weight, batches):
    def training_step(self, batch, batch_idx):
        return {"loss": Net.training_step(self, batch, batch_idx), "weight": weight * len(batch[0])}

    modules = Net(), with_methods("Weighted", training_step=training_step)()
    plain, weighted = (train(True, module, accumulate_grad_batches=batches)[0]["weights"] for module in modules)
    assert not differences(plain, weighted, 1e-6)


def test_a_step_whose_weights_are_all_zero_has_zero_gradients():
    def training_step(self, batch, batch_idx):
        return {"loss": Net.training_step(self, batch, batch_idx), "weight": torch.tensor(0)}

    def record(trainer, module, optimizer):
        gradients.extend(parameter.grad.abs().sum().item() for parameter in module.parameters())

    gradients, module = [], with_methods("Weightless", training_step=training_step)()
    train(True, module, [LambdaCallback(on_before_optimizer_step=record)])
    assert gradients and set(gradients) == {0.0}


@pytest.mark.filterwarnings("ignore:.*decides the order of")
@pytest.mark.parametrize(("limit", "micro_batches"), [(None, 1), (8, 1), (7, 2), (4, 2), (3, 3), (1, 8)])
def test_accumulate_grad_batches_equals_the_number_of_micro_batches_of_a_managed_loader(limit, micro_batches):
    plan = SamplingPlan(global_batch_size=8, max_device_batch_size=limit)
    strategy = connected_strategy(plan, accumulate_grad_batches=9)
    user_loader = [torch.ones(1)]
    assert strategy.process_dataloader(user_loader) is user_loader
    assert strategy.lightning_module.trainer.accumulate_grad_batches == 9
    strategy.process_dataloader(DataLoader(DATA, batch_size=4))
    assert strategy.lightning_module.trainer.accumulate_grad_batches == micro_batches


@pytest.mark.parametrize(
    ("module", "callbacks", "reason"),
    [
        (ManualNet, [], "a module with manual optimization, which decides itself when to step"),
        (BoringModel, [GradientAccumulationScheduler({0: 2})], "a GradientAccumulationScheduler, which decides itself"),
    ],
)
def test_micro_batches_are_refused_if_the_module_or_a_callback_decides_when_to_step(module, callbacks, reason):
    plan = SamplingPlan(global_batch_size=8, max_device_batch_size=4)
    strategy = connected_strategy(plan, module(), callbacks=callbacks)
    with pytest.raises(RequestError, match=reason) as refused:
        strategy.process_dataloader(DataLoader(DATA, batch_size=4))
    assert refused.value.asked == "2 batches a step"
    assert refused.value.instead == "a smaller --global_batch_size, or no --max_device_batch_size"


def module_with(*layers):
    module = BoringModel()
    module.more = nn.Sequential(*layers)
    return module


@pytest.mark.parametrize(
    ("layer", "size", "drop_last", "warns"),
    [
        (nn.BatchNorm1d(2), 4, False, True),  # batches of 4, 4 and 1 samples
        (nn.BatchNorm2d(2), 1, False, True),
        (nn.BatchNorm1d(2), 4, True, False),
        *((layer, 4, False, False) for layer in (nn.LayerNorm(2), nn.InstanceNorm1d(2))),
    ],
)
def test_batch_norm_with_a_single_sample_warns(recwarn, layer, size, drop_last, warns):
    strategy = connected_strategy(SamplingPlan(), module_with(nn.Sequential(layer)))
    strategy.process_dataloader(DataLoader(DATA, batch_size=size, drop_last=drop_last))
    messages = [str(warning.message) for warning in recwarn if "which batch norm may refuse" in str(warning.message)]
    assert len(messages) == warns
    assert not messages or f"9 samples, {size} a step" in messages[0]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BoringModel(), None),
        (ManualNet(), "manual optimization"),
        (module_with(nn.SyncBatchNorm(2)), "SyncBatchNorm"),
        (module_with(nn.BatchNorm1d(2)), None),
    ],
)
def test_empty_ranks_are_padded_with_a_warning_only_if_the_module_needs_samples(recwarn, module, reason):
    strategy = connected_strategy(SamplingPlan(rank=1, world_size=2), module)
    strategy.process_dataloader(DataLoader(DATA, batch_size=4))
    assert strategy.plan.order.is_padded == bool(reason)
    messages = [str(warning.message) for warning in recwarn if "each process needs a sample" in str(warning.message)]
    assert [f"needs a sample for {reason}" in message for message in messages] == [True] * bool(reason)


def strategy_and_loaders(*counts, rank=1):
    """Returns a strategy, and loaders of one of two ranks, whose batches of 4 samples have all been read."""
    strategy, loaders = connected_strategy(), []
    for count in counts:
        plan = SamplingPlan(rank=rank, world_size=2, global_batch_size=4)
        data = DataLoader(TensorDataset(torch.zeros(count, 1)), batch_size=4)
        loaders.append(plan.wrap(data, True, lambda batch: [torch.zeros(0, 1)]))
        list(loaders[-1])
    return strategy, loaders


def set_next_share(strategy, loaders):
    """Sets the strategy's share of the next batch, as Lightning's loop does."""
    strategy.lightning_module.trainer.fit_loop._combined_loader = SimpleNamespace(flattened=loaders)
    strategy.on_train_batch_start(None, 0)


@pytest.mark.parametrize(("rank", "last"), [(0, (1, 1, False)), (1, (0, 1, True))])
def test_share_of_each_batch_is_set_in_order_and_scales_the_loss(rank, last):
    """The mean of the ranks' scaled losses is the mean over the samples of the step."""
    strategy, loaders = strategy_and_loaders(9, rank=rank)  # batches of 4, 4 and 1 samples
    shares = []
    for number in range(4):
        set_next_share(strategy, loaders)
        share, scaled = strategy.share, strategy.scale_loss(torch.tensor(6.0)).item()
        shares.append((share.samples, share.total, share.is_empty))
        assert scaled == (6 * 2 * share.samples / share.total if number < 3 else 6)
    assert shares == [(2, 4, False), (2, 4, False), last, (EVEN_SHARE.samples, EVEN_SHARE.total, False)]


def test_several_or_unmanaged_loaders_have_even_shares():
    strategy, loaders = strategy_and_loaders(9, 4)
    for unshared in (loaders, [[1, 2]], []):
        set_next_share(strategy, unshared)
        assert strategy.share is EVEN_SHARE


def test_on_configured_sees_optimizers_before_callbacks_change_them():
    class RecordsRates(LoopCallback):
        def on_configured(self, trainer):
            seen.append((self, [group["lr"] for group in trainer.optimizers[0].param_groups]))

        def on_fit_start(self, trainer, pl_module):
            trainer.optimizers[0].param_groups[0]["lr"] = 0.5

    seen, callbacks = [], [RecordsRates(), RecordsRates()]
    train_in_process(*callbacks, loops=True, fast_dev_run=1, strategy=OneProcess(SamplingPlan(), device="cpu"))
    assert seen == [(callback, [0.1]) for callback in callbacks]


def test_weights_in_training_are_loaded_only_to_train():
    weights = {name: torch.full_like(value, 1.0) for name, value in BoringModel().state_dict().items()}
    training = {name: torch.full_like(value, 2.0) for name, value in weights.items()}
    for function, value in ((TrainerFn.FITTING, 2.0), (TrainerFn.TESTING, 1.0)):
        strategy = connected_strategy()
        trainer = strategy.lightning_module.trainer
        trainer.state.fn, trainer.fit_loop.only_restores = function, False
        strategy.load_model_state_dict({"state_dict": weights, "weights_in_training": training})
        assert strategy.lightning_module.layer.weight.unique().tolist() == [value]
        strategy.load_model_state_dict({"state_dict": weights})
        assert strategy.lightning_module.layer.weight.unique().tolist() == [1.0]
    with pytest.raises(RuntimeError, match="Missing key"):
        strategy.load_model_state_dict({"state_dict": {}})
    strategy.load_model_state_dict({"state_dict": {}}, strict=False)


@pytest.mark.parametrize(("before", "after", "dtype"), [(None, True, torch.float32), (True, None, torch.float64)])
def test_the_steps_of_an_optimizer_are_loaded_as_its_present_kernels_need_them(before, after, dtype):
    """The fused kernels read the number of steps on the GPU, in float32; all others read it on the host."""
    strategy, weights = connected_strategy(), [nn.Parameter(torch.ones(1))]
    saved, strategy.optimizers = torch.optim.AdamW(weights, fused=before), [torch.optim.AdamW(weights, fused=after)]
    weights[0].sum().backward()
    saved.step()
    saved.state[weights[0]]["step"] = torch.tensor(7.0, dtype=torch.float64)
    strategy.load_optimizer_state_dict({"optimizer_states": [saved.state_dict()]})
    step = strategy.optimizers[0].state[weights[0]]["step"]
    assert (step.item(), step.dtype, strategy.optimizers[0].param_groups[0]["fused"]) == (7, dtype, after)


def weights_after_steps_of_four(monkeypatch, **settings):
    monkeypatch.setattr("stock.SamplingPlan", lambda micro_batches: SamplingPlan(global_batch_size=4, **settings))
    return train(True, Net(), max_epochs=1, limit_val_batches=0, loaders=Loaders(11))[0]["weights"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_step_in_micro_batches_equals_the_undivided_step(limit, monkeypatch):
    undivided, divided = (weights_after_steps_of_four(monkeypatch, max_device_batch_size=size) for size in (4, limit))
    for name, value in undivided.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-5, atol=1e-7)
    assert differences(undivided, weights_after_steps_of_four(monkeypatch)) == []
