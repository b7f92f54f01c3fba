"""Data-parallel training: gradients averaged by DistributedDataParallel, also in steps in which ranks differ."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rankzero.distributed.coordinator import Coordinator
from rankzero.distributed.devices import WorldInfo
from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import EVEN
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.gradients import average_gradients
from rankzero.training.strategies import OneProcess, RunStrategy

UNUSED_PARAMETERS = {
    "auto": False,
    "ddp": False,
    "ddp_find_unused_parameters_false": False,
    "ddp_find_unused_parameters_true": True,
}
"""The name of a strategy -> whether DDP looks for parameters that a step did not use."""


def strategy_for(asked: object, world: WorldInfo, coordinator: Coordinator, plan: SamplingPlan) -> RunStrategy:
    """The strategy that keeps the plan of samples.

    Args:
        asked: The Trainer's `strategy`: a name, or a DDPStrategy whose settings are taken over.
        world: What the processes run on.
        coordinator: All processes.
        plan: The order of samples.

    Raises:
        RequestError: It is one that is not known to keep the plan.
    """
    settings: dict[str, Any] = {"process_group_backend": world.backend}
    if type(asked) is DDPStrategy and not asked._model_averaging_period:
        hook = {name: getattr(asked, f"_{name}") for name in ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")}
        settings |= {**hook, **asked._ddp_kwargs, "timeout": asked._timeout}
        settings["precision_plugin"] = asked._precision_plugin
        _check_settings(asked, world.backend)
    elif isinstance(asked, str) and asked in UNUSED_PARAMETERS:
        settings["find_unused_parameters"] = UNUSED_PARAMETERS[asked]
    else:
        raise RequestError(
            f"--trainer.strategy {asked}",
            "a strategy for which the order of samples is not known to be right",
            f"--trainer.strategy {' or '.join(list(UNUSED_PARAMETERS)[:2])}, or ddp_find_unused_parameters_true",
        )
    if world.size == 1:
        device = torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else world.accelerator
        return OneProcess(plan, device=device, precision_plugin=settings.get("precision_plugin"))
    return DataParallel(plan, coordinator, **settings)


def _check_settings(asked: DDPStrategy, backend: str) -> None:
    """Refuses settings of a user's strategy that rankzero decides itself.

    Raises:
        RequestError: There is one.
    """
    found = {
        "checkpoint_io": (asked._checkpoint_io is None, "checkpoints are written by rankzero"),
        "start_method": (asked._start_method == "popen", "processes are started by a launcher, or by devices=N"),
        "process_group_backend": (
            asked._process_group_backend in (None, backend),
            f"processes communicate by {backend} on these devices; --backend chooses another",
        ),
    }
    for name, (is_default, reason) in found.items():
        if not is_default:
            raise RequestError(f"DDPStrategy({name}=...)", reason, f"DDPStrategy without {name}")


class DataParallel(RunStrategy, DDPStrategy):
    """One process a device, gradients averaged by DistributedDataParallel.

    Args:
        plan: The order of samples.
        coordinator: All processes.
        arguments: The strategy's.
    """

    def __init__(self, plan: SamplingPlan, coordinator: Coordinator, **arguments: Any) -> None:
        super().__init__(plan=plan, **arguments)
        self.coordinator = coordinator
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
        """Creates the process group on the coordinator's store; Lightning then finds it there. All ranks must call.

        Lightning (2.6) seeds all generators anew here, but not in a single process: a split drawn in `setup` would
        depend on whether there is one process or several. Here all ranks continue with rank zero's generators.
        """
        self.coordinator.init_process_group(self._get_process_group_backend(), self.root_device, self._timeout)
        drawn = _collect_rng_states(include_cuda=False)
        super().setup_distributed()
        _set_rng_states(self.broadcast(drawn))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.coordinator.launch.world_size
        # A tensor on a GPU would come out on a GPU of the same number, on each rank.
        torch.distributed.all_gather_object(
            values, apply_to_collection(value, Tensor, lambda tensor: tensor.detach().cpu())
        )
        return values

    def reduce_together(self, values: Tensor, operation: str) -> int:
        torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, operation.upper()))
        return torch.distributed.get_world_size()

    def add_up(self, numbers: Sequence[int]) -> list[int]:
        sums = torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64)).to(self.root_device)
        torch.distributed.all_reduce(sums)
        return [int(number) for number in sums.cpu().numpy().view(np.uint64)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; where some rank has nothing, without DDP, in whose passes every rank would have to take part."""
        if not self.share.has_empty_rank:
            self._part = self.share.metric_weight
            try:
                return super().training_step(*args, **kwargs)
            finally:
                self._part = 1.0
        if self.share.is_empty:
            return torch.zeros((), device=self.root_device, requires_grad=True)  # a loss that leads nowhere
        with self.precision_plugin.train_step_context():
            return self._alone(self._module.training_step, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Averages the gradients where DDP has not. All ranks must call."""
        super().post_backward(closure_loss)
        if self.share.has_empty_rank and not self._module.trainer.fit_loop._should_accumulate():
            average_gradients(self._module.parameters(), self.coordinator.launch.world_size)

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
        self.share = loader.next_share() if isinstance(loader, ManagedLoader) else EVEN
        return None if self.share.is_empty else self._alone(step, *args)

    def _alone(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes a step that not all ranks may take."""
        self._apart = self.share.has_empty_rank
        try:
            return step(*args, **kwargs)
        finally:
            self._apart = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over ranks; a mean within a step by their shares, and not at all where some rank has nothing."""
        if self._apart or not isinstance(tensor, Tensor):
            return tensor
        return super().reduce(self.part(tensor, reduce_op), group, reduce_op)

    def part(self, value: Tensor, reduce_op: Any) -> Tensor:
        return value * self._part if self._part != 1 and _is_mean(reduce_op) else value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._apart:
            raise RuntimeError(
                "all_gather in a step in which some rank has no sample: it would wait for ever. "
                "DataLoader(drop_last=True), or a --global_batch_size that divides the number of samples, avoids it"
            )
        return super().all_gather(tensor, group, sync_grads)


def _is_mean(reduce_op: Any) -> bool:
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return bool(reduce_op == torch.distributed.ReduceOp.AVG)


def _trained(module: LightningModule) -> set[int]:
    """The identities of the parameters that are not frozen."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
