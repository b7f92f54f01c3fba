"""Lightning's strategies with what the run owns put in: the order of samples, and steps in which ranks differ."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from rankzero.distributed.coordinator import Team
from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import EVEN, TrainingBatches
from rankzero.sampling.loader import OrderedLoader
from rankzero.sampling.plan import Sharding
from rankzero.training.fast.torch_calls import forward_through, looks_at_forward
from rankzero.training.gradients import average_gradients
from rankzero.training.hooks import LoopHooks
from rankzero.training.saved_state.parameter_groups import add_missing_groups
from rankzero.training.saved_state.pruning import without_pruning


class RunStrategy(Strategy):
    """What our strategies have in common: the run's order of samples takes the place of the loaders' own.

    Args:
        sharding: The order of samples.
        arguments: The strategy's.
    """

    def __init__(self, sharding: Sharding, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sharding = sharding
        self.share = EVEN
        """This rank's share of the current batch."""
        self.before_idle_step: Callable[[], None] = lambda: None
        """Called on all ranks before a step in which some rank has no sample."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        loads = self.sharding.loads_training  # a finder loads validation data while the stage is training
        training = trainer.state.stage is RunningStage.TRAINING if loads is None else loads
        loader = self.sharding.apply(dataloader, training, self.broadcast, self._pads() if training else None)
        if training and self.sharding.order:
            self._accumulate(self.sharding.order.micro_batches)
            self._warn_of_single_samples(self.sharding.order)
        return loader

    def _accumulate(self, micro_batches: int) -> None:
        """Has Lightning step once in so many batches.

        Raises:
            RequestError: The module, or a callback, steps when it wants.
        """
        trainer = self._module.trainer
        schedules = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)  # type: ignore[attr-defined]
        own_way = "a GradientAccumulationScheduler" if schedules else "a module that optimises by hand"
        if micro_batches > 1 and (schedules or not self._module.automatic_optimization):
            raise RequestError(
                f"{micro_batches} batches a step",
                f"{own_way}, which says itself when to step",
                "a smaller --global_batch_size, or no --max_device_batch_size",
            )
        if not schedules:
            trainer.accumulate_grad_batches = micro_batches

    def _warn_of_single_samples(self, order: TrainingBatches) -> None:
        if order.leaves_single() and any(isinstance(module, _BatchNorm) for module in self._module.modules()):
            rank_zero_warn(
                f"rankzero: {order.count:,} samples, {order.global_batch_size:,} a step: in some step a process has a "
                "single one, which batch norm may refuse. DataLoader(drop_last=True), or another --global_batch_size, "
                "avoids it"
            )

    def _pads(self) -> str | None:
        """What of this module cannot do without a sample on every rank."""
        if not self._module.automatic_optimization:
            return "manual optimisation"
        synced = any(isinstance(module, torch.nn.SyncBatchNorm) for module in self._module.modules())
        return "SyncBatchNorm" if synced else None

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LoopHooks):
                callback.on_configured(trainer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model; a pruned one is pruned again once its optimizers have been configured."""
        fits = self._module.trainer.state.fn is TrainerFn.FITTING
        if fits and "weights_in_training" in checkpoint:
            checkpoint = {**checkpoint, "state_dict": checkpoint["weights_in_training"]}
        if pruned := checkpoint.get("pruned"):
            state = without_pruning(checkpoint["state_dict"], pruned, masked=not fits)
            checkpoint = {**checkpoint, "state_dict": state}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = checkpoint.get("live_settings", {}).get("groups", [])
        add_missing_groups(self._module, self.optimizers, saved)
        super().load_optimizer_state_dict(checkpoint)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        combined = self._module.trainer.fit_loop._combined_loader
        assert combined is not None
        self.take_share(combined.flattened)

    def take_share(self, loaders: Sequence[object]) -> None:
        """Finds out what this rank has of the batch that was read last."""
        for loader in loaders:
            self.share = loader.next_share() if isinstance(loader, OrderedLoader) else EVEN
        if len(loaders) > 1:  # none of them can say alone what a sample's part of the loss is
            self.share = EVEN
        if self.share.idle:
            self.before_idle_step()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(self.weighed(closure_loss), optimizer, *args, **kwargs)

    def weighed(self, loss: Tensor) -> Tensor:
        """A loss by which the gradient is that of the mean over the global batch."""
        return loss if self.share.weight == 1 else loss * self.share.weight

    def part(self, value: Tensor, reduce_op: Any) -> Tensor:
        """What of a value of this step goes into its reduction over ranks; a mean is weighed by shares."""
        return value

    def synchronize_new_parameters(self) -> None:
        """Has ranks average the gradients of parameters that were unfrozen. All ranks must call."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. All ranks must call."""
        return [value]

    def reduce_together(self, values: Tensor, operation: str, group: Any = None) -> int:
        """Reduces each of many values over ranks, in place: their sum, max or min. All ranks must call.

        Returns:
            Over how many ranks.
        """
        return 1

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        """Sums over all ranks, modulo 2^64. All ranks must call."""
        return list(numbers)


def strategy_of(trainer: Trainer) -> RunStrategy:
    """The trainer's strategy, which is one of ours."""
    assert isinstance(trainer.strategy, RunStrategy)
    return trainer.strategy


class OneProcess(RunStrategy, SingleDeviceStrategy):
    """One process on one device."""


class DataParallel(RunStrategy, DDPStrategy):
    """One process a device, gradients averaged by DistributedDataParallel.

    Args:
        sharding: The order of samples.
        team: All processes.
        arguments: The strategy's.
    """

    def __init__(self, sharding: Sharding, team: Team, **arguments: Any) -> None:
        super().__init__(sharding=sharding, **arguments)
        self._forward_redirection = _Redirection()
        self.team = team
        self._apart = False
        """Whether a step is under way that not all ranks take."""
        self._part = 1.0
        """By what a mean of this rank is multiplied in the step that is under way."""

    def configure_ddp(self) -> None:
        self._synchronized = _trained(self._module)
        super().configure_ddp()

    def synchronize_new_parameters(self) -> None:
        """Wraps the module anew where a callback has unfrozen parameters since. All ranks must call.

        DistributedDataParallel averages the gradients of the parameters that were trained when it was built. Those
        that are unfrozen later would drift apart between ranks, as they do in stock Lightning.
        """
        if isinstance(self.model, DistributedDataParallel) and not _trained(self._module) <= self._synchronized:
            self.model = self._module
            gc.collect()  # the hooks of the former wrapper end with it
            self.configure_ddp()

    @property
    def root_device(self) -> torch.device:
        """This process's device; Lightning would look it up by local rank, but here each process lists its own."""
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    def setup_distributed(self) -> None:
        """Makes the process group where the team has met; Lightning then finds it there. All ranks must call.

        Lightning (2.6) seeds all generators anew here, but not in a single process: a split drawn in `setup` would
        depend on whether there is one process or several. Here all ranks continue with rank zero's generators.
        """
        self.team.join(self._get_process_group_backend(), self.root_device, self._timeout)
        drawn = _collect_rng_states(include_cuda=False)
        super().setup_distributed()
        _set_rng_states(self.broadcast(drawn))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.team.launch.world_size
        # A tensor on a GPU would come out on a GPU of the same number, on each rank.
        torch.distributed.all_gather_object(values, apply_to_collection(value, Tensor, lambda one: one.detach().cpu()))
        return values

    def reduce_together(self, values: Tensor, operation: str, group: Any = None) -> int:
        torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, operation.upper()), group)
        return torch.distributed.get_world_size(group)

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        sums = torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64)).to(self.root_device)
        torch.distributed.all_reduce(sums)
        return [int(number) for number in sums.cpu().numpy().view(np.uint64)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; where some rank has nothing, without DDP, in whose passes every rank would have to take part."""
        if not self.share.idle:
            self._part = self.share.part
            try:
                if type(self.precision_plugin) is Precision:  # whose context does nothing
                    return self._forward_redirection(self.model, self._module, "training_step", *args, **kwargs)  # type: ignore[arg-type]
                return super().training_step(*args, **kwargs)
            finally:
                self._part = 1.0
        if self.share.nothing:
            return torch.zeros((), device=self.root_device, requires_grad=True)  # a loss that leads nowhere
        with self.precision_plugin.train_step_context():
            return self._alone(self._module.training_step, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Averages the gradients where DDP has not. All ranks must call."""
        super().post_backward(closure_loss)
        if self.share.idle and not self._module.trainer.fit_loop._should_accumulate():
            average_gradients(self._module.parameters(), self.team.launch.world_size)

    def on_validation_start(self) -> None:
        """Takes rank zero's buffers (running means of batch norm) on every rank. All ranks must call."""
        super().on_validation_start()
        if isinstance(self.model, DistributedDataParallel) and self.model.will_sync_module_buffers():
            self.model._sync_buffers()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, not DDP around it, whose forward broadcasts buffers in evaluation too."""
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself."""
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself."""
        combined = self._module.trainer.predict_loop._combined_loader
        assert combined is not None
        loaders = combined.flattened
        with self.precision_plugin.predict_step_context():
            # With several loaders Lightning passes the index of the loader last.
            return self._step_of(loaders[args[-1] if len(loaders) > 1 else 0], self._module.predict_step, *args)

    def _evaluate(self, step: Any, *args: Any) -> Any:
        trainer = self._module.trainer
        combined, results = trainer._evaluation_loop._combined_loader, trainer._results
        assert combined is not None and results is not None
        return self._step_of(combined.flattened[results.dataloader_idx or 0], step, *args)

    def _step_of(self, loader: object, step: Any, *args: Any) -> Any:
        """Takes a step, but on a rank that has nothing."""
        self.share = loader.next_share() if isinstance(loader, OrderedLoader) else EVEN
        return None if self.share.nothing else self._alone(step, *args)

    def _alone(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes a step that not all ranks may take."""
        self._apart = self.share.idle
        try:
            return step(*args, **kwargs)
        finally:
            self._apart = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over ranks; a mean within a step by their shares, and not at all where some rank has nothing."""
        if self._apart:
            return tensor
        return super().reduce(self.part(tensor, reduce_op), group, reduce_op)

    def part(self, value: Tensor, reduce_op: Any) -> Tensor:
        return value * self._part if self._part != 1 and reduce_op in ("mean", "avg") else value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._apart:
            raise RuntimeError(
                "all_gather in a step in which some rank has no sample: it would wait for ever. "
                "DataLoader(drop_last=True), or a --global_batch_size that divides the number of samples, avoids it"
            )
        return super().all_gather(tensor, group, sync_grads)


def _trained(module: LightningModule) -> set[int]:
    """The identities of the parameters that are not frozen."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


class _Redirection(_DDPForwardRedirection):
    """Has a step of the module taken in place of its forward, within DDP's; at once where nobody looks on."""

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        by_hand = not original_module.automatic_optimization
        if by_hand or looks_at_forward(wrapper_module) or wrapper_module.module is not original_module:
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        return forward_through(wrapper_module, getattr(original_module, method_name), *args, **kwargs)
