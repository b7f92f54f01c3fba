"""Lightning's strategies with the run's order of samples and with steps in which some rank has no sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import DataLoader

from rankzero.distributed.coordination.process_group import init_process_group
from rankzero.distributed.devices import GatheredRows
from rankzero.distributed.world import World
from rankzero.messages import RequestError, RunError
from rankzero.sampling.batch_sampler import EVEN_SHARE, ElasticBatchSampler, Share
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from rankzero.sampling.stream import Stream, StreamLoader
from rankzero.training.hooks import LoopHooks
from rankzero.training.lightning_inside import overrides
from rankzero.training.saved_state.from_directory import with_keys_of
from rankzero.training.saved_state.module_state import add_missing_groups, pruned_parameters, without_pruning

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class RunStrategy(Strategy):
    """Base class of Rankzero's strategies, which replace the loaders' order of samples with the run's order."""

    def __init__(self, plan: SamplingPlan, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.plan = plan
        self.share = EVEN_SHARE
        """This rank's share of the current batch."""
        self.scale: float | Tensor = 1.0
        """Factor of the current batch's loss."""
        self.weight: float | Tensor | None = None
        """The weight that `training_step` has returned with the loss."""
        self._weights: float | Tensor = 0.0
        """Sum of this rank's weights in the current step."""
        self.is_weighted: bool | None = None
        """Whether the losses of this fit have weights; None before the first step."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        loads_training = self.plan.loads_training  # a finder loads validation data while the stage is training
        is_training = trainer.state.stage is RunningStage.TRAINING if loads_training is None else loads_training
        padded_for = self._feature_needing_samples() if is_training else None
        # A training_step that takes the iterator may read another number of batches on each rank.
        takes_iterator = is_param_in_hook_signature(self._module.training_step, "dataloader_iter", explicit=True)
        stream = None if takes_iterator else self._stream_loader
        loader = self.plan.wrap(dataloader, is_training, self.broadcast, padded_for, self.gather, stream)
        if isinstance(loader, ManagedLoader) and self.root_device.type == "cuda":
            owners = self._module, trainer.datamodule  # type: ignore[attr-defined]
            hooks = ("on_before_batch_transfer", "transfer_batch_to_device")  # they expect a batch in host memory
            copies = not any(overrides(owner, hook, LightningModule) for owner in owners for hook in hooks)
            loader.read_for(self.root_device, copies, _is_channels_last(self._module))
        if is_training and self.plan.order:
            self._set_micro_batches(self.plan.order.micro_batches)
            self._warn_of_single_samples(self.plan.order)
        return loader

    def _stream_loader(self, loader: "DataLoader[Any]", kept: Any) -> StreamLoader:
        trainer, plan, exchange = self._module.trainer, self.plan, (self.gather, self.begin_gather_rows)
        stream = Stream(loader, plan.rank, plan.seed, kept, lambda: trainer.current_epoch, *exchange)
        return StreamLoader(loader, stream)

    def _set_micro_batches(self, micro_batches: int) -> None:
        """Sets the micro-batches per step; raises a RequestError if the module or a callback decides when to step."""
        trainer = self._module.trainer
        has_scheduler = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        conflict = "a GradientAccumulationScheduler" if has_scheduler else "a module with manual optimization"
        if micro_batches > 1 and (has_scheduler or not self._module.automatic_optimization):
            raise RequestError(
                f"{micro_batches} batches a step",
                f"{conflict}, which decides itself when to step",
                "a smaller --global_batch_size, or no --max_device_batch_size",
            )
        if not has_scheduler:
            trainer.accumulate_grad_batches = micro_batches

    def _warn_of_single_samples(self, order: ElasticBatchSampler) -> None:
        if order.has_single_samples() and any(isinstance(module, BATCH_NORMS) for module in self._module.modules()):
            rank_zero_warn(
                f"rankzero: {order.count:,} samples, {order.global_batch_size:,} a step: in some step a process has a "
                "single sample, which batch norm may refuse. DataLoader(drop_last=True), or another "
                "--global_batch_size, avoids it"
            )

    def _feature_needing_samples(self) -> str | None:
        """Returns the feature of this module that needs a non-empty batch on every rank, or None."""
        if not self._module.automatic_optimization:
            return "manual optimization"
        has_sync_batch_norm = any(isinstance(module, torch.nn.SyncBatchNorm) for module in self._module.modules())
        return "SyncBatchNorm" if has_sync_batch_norm else None

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self.weight, self.is_weighted = None, None if self._module.automatic_optimization else False
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LoopHooks):
                callback.on_configured(trainer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model without pruning; in a fit, `LiveSettings` prunes it again after optimizers are configured."""
        trainer = self._module.trainer
        trains = trainer.state.fn is TrainerFn.FITTING and not trainer.fit_loop.only_restores  # type: ignore[attr-defined]
        state = checkpoint.get("weights_in_training") if trains else None
        state = checkpoint["state_dict"] if state is None else state
        already_pruned = pruned_parameters(self._module)  # by the user's script, between two calls of `fit`
        pruned = {name: masks for name, masks in checkpoint.get("pruned", {}).items() if name not in already_pruned}
        if pruned:
            state = without_pruning(state, pruned, masked=not trains)
        super().load_model_state_dict({**checkpoint, "state_dict": with_keys_of(self._module, state)}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        add_missing_groups(self._module, self.optimizers, checkpoint.get("live_settings", {}).get("groups", []))
        # These settings decide whether torch loads the number of steps onto the GPU. Fused kernels read it there.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            for group, saved in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
                saved.update({key: group[key] for key in ("fused", "capturable") if key in group})
        super().load_optimizer_state_dict(checkpoint)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        combined = self._module.trainer.fit_loop._combined_loader
        assert combined is not None
        self.share = shares_from(combined.flattened)()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(self.scale_loss(closure_loss), optimizer, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.weigh(super().training_step(*args, **kwargs))

    def weigh(self, output: Any) -> Any:
        """Keeps the weight in the output of a `training_step` for `scale_loss`; returns the output.

        Raises:
            RunError: The weight is not a number.
        """
        weight = output.get("weight") if isinstance(output, Mapping) and self._module.automatic_optimization else None
        if not (weight is None or isinstance(weight, int | float) or getattr(weight, "shape", None) == ()):
            found = f"of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
            raise RunError(f'training_step returned a "weight" {found}; return a number, or rename the entry')
        self.weight = weight.detach().float() if isinstance(weight, Tensor) else weight
        return output

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scales a loss so that the averaged gradient is that of the mean over the global batch.

        The mean is weighted if `training_step` returns weights. All ranks must call.

        Raises:
            RunError: Only some of the losses have weights.
        """
        has_weight, share = self.weight is not None, self.share
        if self.is_weighted is None and not share.has_empty_rank:
            self.is_weighted = self.gather(has_weight)[0]
        if self.is_weighted not in (None, has_weight) and not share.is_empty:
            raise RunError('training_step returned a "weight" with some losses only; return it always or never')
        if self.is_weighted is not False:
            trainer: Any = self._module.trainer
            if (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches == 0:
                self._weights = 0.0  # the step before may be incomplete
        weight = self.weight if share.samples else 0.0  # a repeated batch has no weight
        self.scale = share.loss_weight if self.weight is None or weight is None else self._scale_by_weight(weight)
        return loss * self.scale if has_weight or self.scale != 1 else loss

    def _scale_by_weight(self, weight: float | Tensor) -> float | Tensor:
        trainer: Any = self._module.trainer
        loop, batches = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        self._weights += weight
        scale: float | Tensor = weight * batches  # because Lightning divides the loss by the number of batches
        if loop.should_accumulate() or self.share.has_empty_rank:
            return scale
        return scale / self.divide_by_weights()

    def divide_by_weights(self) -> Tensor:
        """Divides the gradients by the ranks' mean weight in this step; returns this mean. All ranks must call."""
        weights = torch.as_tensor(self._weights, dtype=torch.float32, device=self.root_device).clone()
        self.sum_in_place(weights)
        mean, self._weights = torch.where(weights != 0, weights / self._module.trainer.world_size, 1.0), 0.0
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(mean)
        return mean

    @property
    def needs_wrapper(self) -> bool:
        """Whether the user has configured how DistributedDataParallel averages gradients."""
        return False

    def run_locally(self, step: Callable[..., Any], *batch: Any) -> Any:
        """Runs a training step on the module itself, without averaging gradients."""
        return step(*batch)

    def average_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Averages the gradients of parameters, the same on all ranks, after `run_locally`. All ranks must call."""

    def synchronize_new_parameters(self) -> None:
        """Makes ranks also average the gradients of newly unfrozen parameters. All ranks must call."""

    def refuse_collectives(self) -> None:
        """Makes the methods below raise an error, if a callback saves after this rank has failed.

        gloo aborts the other ranks if they are in another collective.
        """

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in order of rank. All ranks must call."""
        return [value]

    def gather_on_rank_zero(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on rank zero, and an empty list on all others. All ranks must call."""
        return [value]

    def sum_in_place(self, values: Tensor) -> None:
        """Replaces each element by its sum over ranks. All ranks must call."""

    def begin_gather_rows(self, row: Tensor) -> GatheredRows:
        """Begins to gather the rows of all ranks, which have the same length. All ranks must call."""
        return GatheredRows(row.unsqueeze(0))

    def sum_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        """Returns the sum of each number over all ranks, modulo 2^64. All ranks must call."""
        return list(numbers)


def shares_from(loaders: Sequence[object]) -> Callable[[], Share]:
    """Returns a function that returns this rank's share of the next batch, in the order in which batches were read."""
    managed = [loader for loader in loaders if isinstance(loader, ManagedLoader)]
    if managed and len(loaders) == 1:
        return managed[0].next_share

    def next_even_share() -> Share:
        for loader in managed:  # with several loaders, no single share determines a sample's weight in the loss
            loader.next_share()
        return EVEN_SHARE

    return next_even_share


def _is_channels_last(module: LightningModule) -> bool:
    """Returns whether the weights of a module's 2D convolutions have the memory layout channels_last."""
    weights = [weight for weight in module.parameters() if weight.dim() == 4 and not weight.is_contiguous()]
    return any(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def strategy_of(trainer: Trainer) -> RunStrategy:
    """Returns the Trainer's strategy, which is always a `RunStrategy`."""
    assert isinstance(trainer.strategy, RunStrategy)
    return trainer.strategy


class OneProcess(RunStrategy, SingleDeviceStrategy):
    """Strategy for a single process on one device, with a process group of one if `group_backend` is set."""

    def __init__(self, plan: SamplingPlan, group_backend: str | None = None, **arguments: Any) -> None:
        super().__init__(plan=plan, **arguments)
        self._group_backend = group_backend

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._group_backend and not torch.distributed.is_initialized():
            init_process_group(None, World(), self._group_backend, self.root_device, None)
