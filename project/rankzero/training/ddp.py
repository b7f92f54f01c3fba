"""Data-parallel training with DistributedDataParallel, including steps in which some rank has no sample."""

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from rankzero.distributed.coordination.coordinator import Coordinator
from rankzero.distributed.devices import GatheredRows, moved, synchronize
from rankzero.distributed.torch_inside import synchronize_buffers
from rankzero.distributed.world import World
from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import EVEN_SHARE
from rankzero.sampling.loader import ManagedLoader
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.lightning_inside import ddp_arguments, evaluated_loader
from rankzero.training.saved_state.rank_states import load_generators, save_generators
from rankzero.training.strategies import BATCH_NORMS, OneProcess, RunStrategy

BUCKET_BYTES = 25 * 2**20
"""Size of the buffers that are averaged at a time; the default of DistributedDataParallel."""

FIND_UNUSED_PARAMETERS = {"auto": False} | {
    f"{name}{suffix}": suffix.endswith("true")
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
    for suffix in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
}
"""Strategy name -> whether DistributedDataParallel searches for parameters that a step did not use."""


def strategy_for(
    requested: object,
    world: World,
    coordinator: Coordinator,
    plan: SamplingPlan,
    is_fast: bool = False,
    compiles: bool = False,
) -> RunStrategy:
    """Returns the strategy that reads the samples in the order of the plan.

    `requested` is the Trainer's `strategy`: a name, or a `DDPStrategy` whose settings are kept. With `--fast yes`,
    gradients are views of the memory that is reduced. With `compiles`, steps may bypass DistributedDataParallel.

    Raises:
        RequestError: The strategy is not known to keep the order of samples, or it sets an unsupported option.
    """
    settings: dict[str, Any] = {"process_group_backend": world.backend}
    settings |= {"gradient_as_bucket_view": True} if is_fast else {}
    given = ddp_arguments(requested) if type(requested) is DDPStrategy else {}
    if given and not given.pop("model_averaging_period"):
        _check_settings(given, world.backend)
        settings |= given | {"process_group_backend": world.backend}
    elif isinstance(requested, str) and requested.lower() in FIND_UNUSED_PARAMETERS:
        settings["find_unused_parameters"] = FIND_UNUSED_PARAMETERS[requested.lower()]
    else:
        raise RequestError(
            f"--trainer.strategy {requested}",
            "Rankzero supports Lightning's DDPStrategy without model averaging, and no other strategy",
            f"--trainer.strategy {' or '.join(list(FIND_UNUSED_PARAMETERS)[:2])}, or ddp_find_unused_parameters_true",
        )
    if world.size == 1:
        device = torch.device(world.accelerator, world.index) if world.accelerator == "cuda" else world.accelerator
        group_backend = None if requested == "auto" else world.backend
        return OneProcess(plan, group_backend, device=device, precision_plugin=settings.get("precision_plugin"))
    return DataParallel(plan, coordinator, is_fast or compiles, **settings)


def _check_settings(given: dict[str, Any], backend: str) -> None:
    """Raises a RequestError if a user's strategy sets an option that Rankzero decides itself."""
    communication = f"processes communicate by {backend} on these devices; another one is selected by --backend"
    checks = {
        "checkpoint_io": ((None,), "checkpoints are written by rankzero"),
        "start_method": (("popen",), "processes are started by a launcher, or by devices=N"),
        "process_group_backend": ((None, backend), communication),
    }
    for name, (allowed, reason) in checks.items():
        if given[name] not in allowed:
            raise RequestError(f"DDPStrategy({name}=...)", reason, f"DDPStrategy without {name}")


class DataParallel(RunStrategy, DDPStrategy):
    """Strategy with one process per device, whose gradients DistributedDataParallel averages.

    With `defers_buffers`, buffers of batch norm, which training does not read, are copied to all ranks only where they
    may be read, not in every step.
    """

    def __init__(
        self, plan: SamplingPlan, coordinator: Coordinator, defers_buffers: bool = False, **arguments: Any
    ) -> None:
        super().__init__(plan=plan, **arguments)
        self.coordinator, self._may_defer_buffers, self._defers_buffers = coordinator, defers_buffers, False
        self._buckets: tuple[Sequence[Parameter], list[list[Parameter]]] = (), []
        """The parameters of which gradients were last averaged, and their buckets."""
        self._skips_collectives = False
        """True during a step that some rank skips for lack of samples, in which a collective would block."""
        self._metric_weight = 1.0
        """Factor for means of this rank in the current training step; 1 outside of training steps."""

    def configure_ddp(self) -> None:
        self._synchronized_ids = _trainable_ids(self._module)
        super().configure_ddp()
        model: Any = self.model
        owners = [owner for owner in self._module.modules() if [*owner.buffers(recurse=False)]]
        has_only_means = all(isinstance(owner, BATCH_NORMS) for owner in owners)  # which only evaluation reads
        self._defers_buffers = self._may_defer_buffers and model.will_sync_module_buffers() and has_only_means
        model.broadcast_buffers &= not self._defers_buffers

    def synchronize_new_parameters(self) -> None:
        """Wraps the module again if a callback has unfrozen parameters since. All ranks must call.

        DistributedDataParallel only averages gradients of the parameters that were trainable when it was created.
        Parameters that are unfrozen later would diverge between ranks, as they do in stock Lightning.
        """
        if self._defers_buffers:  # a callback may have set batch norm to evaluation
            self._copy_buffers()
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        if is_wrapped and not _trainable_ids(self._module) <= self._synchronized_ids:
            self.model = self._module
            gc.collect()  # frees the old wrapper, and with it the wrapper's gradient hooks
            # Lightning (2.6) wraps on a stream of its own, which broadcasts the weights: after the optimizer's step,
            # and before the next forward pass.
            synchronize(self.root_device)
            self.configure_ddp()
            synchronize(self.root_device)

    @property
    def root_device(self) -> torch.device:
        """This process's device, the only one in the list; Lightning would look it up by local rank and fail."""
        assert self.parallel_devices is not None
        return self.parallel_devices[0]

    def setup_distributed(self) -> None:
        """Creates the process group on the coordinator's store; Lightning then uses this group. All ranks must call.

        Lightning (2.6) reseeds all generators here, but not in a single process. A random split drawn in `setup` would
        then depend on the number of processes. Instead, all ranks continue with rank zero's CPU generators.
        """
        given = ddp_arguments(self)
        self.coordinator.init_process_group(given["process_group_backend"], self.root_device, given["timeout"])
        generator_states = save_generators(torch.device("cpu"))
        super().setup_distributed()
        load_generators(self.broadcast(generator_states), torch.device("cpu"))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.coordinator.world.size
        torch.distributed.all_gather_object(values, _on_host(value))
        return values

    def gather_on_rank_zero(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.coordinator.world.size if self.is_global_zero else []
        torch.distributed.gather_object(_on_host(value), values or None)
        return values

    def sum_in_place(self, values: Tensor) -> None:
        torch.distributed.all_reduce(values)

    def begin_gather_rows(self, row: Tensor) -> GatheredRows:
        ranks = self.coordinator.world.size
        row = moved(row, self.root_device if self.process_group_backend == "nccl" else torch.device("cpu"))
        rows = row.new_empty(ranks * len(row))
        work = torch.distributed.all_gather_into_tensor(rows, row, async_op=True)
        return GatheredRows(rows.view(ranks, len(row)), work)

    def sum_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        sums = torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64)).to(self.root_device)
        torch.distributed.all_reduce(sums)
        return [int(number) for number in sums.cpu().numpy().view(np.uint64)]

    def refuse_collectives(self) -> None:
        def refuse(*_: Any) -> None:
            raise RuntimeError("a rank that has failed takes part in no collective")

        names = ("gather", "gather_on_rank_zero", "sum_in_place", "begin_gather_rows", "sum_over_ranks")
        vars(self).update(dict.fromkeys(names, refuse))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a training step; if some rank has no sample, without DistributedDataParallel, which needs all ranks."""
        if not self.share.has_empty_rank:
            return self._run_weighted(super().training_step, *args, **kwargs)
        if self.share.is_empty:
            return self.weigh(torch.zeros((), device=self.root_device, requires_grad=True))  # depends on no parameter
        with self.precision_plugin.train_step_context():
            return self.weigh(self._run_local_step(self._module.training_step, *args, **kwargs))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Averages the gradients of steps that bypass DistributedDataParallel. All ranks must call."""
        super().post_backward(closure_loss)
        epoch_loop: Any = self._module.trainer.fit_loop.epoch_loop
        if self.share.has_empty_rank and not epoch_loop.should_accumulate():
            average_gradients(self._module.parameters(), self.coordinator.world.size)
            if self.is_weighted is not False:
                self.divide_by_weights()

    @property
    def needs_wrapper(self) -> bool:
        return ddp_arguments(self)["ddp_comm_hook"] is not None

    def run_locally(self, step: Callable[..., Any], *batch: Any) -> Any:
        if not self._defers_buffers:
            self._copy_buffers()
        return self._run_weighted(step, *batch)

    def _run_weighted(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step in which `reduce` weights means by the ranks' shares."""
        self._metric_weight = self.share.metric_weight
        try:
            return step(*args, **kwargs)
        finally:
            self._metric_weight = 1.0

    def average_gradients(self, parameters: Sequence[Parameter]) -> None:
        if self._buckets[0] is not parameters:
            self._buckets = parameters, buckets_of(parameters)
        average_in_buckets(self._buckets[1], self.coordinator.world.size)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._copy_buffers()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._defers_buffers:
            self._copy_buffers()

    def _copy_buffers(self) -> None:
        """Copies rank zero's buffers (such as running means of batch norm) to every rank. All ranks must call."""
        model = self.model
        if isinstance(model, DistributedDataParallel) and (self._defers_buffers or model.will_sync_module_buffers()):
            synchronize_buffers(model)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself: DistributedDataParallel's forward would broadcast buffers in evaluation too."""
        with self.precision_plugin.val_step_context():
            return self._run_step(evaluated_loader(self._module.trainer), self._module.validation_step, *args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, as `validation_step` does."""
        with self.precision_plugin.test_step_context():
            return self._run_step(evaluated_loader(self._module.trainer), self._module.test_step, *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, as `validation_step` does."""
        combined = self._module.trainer.predict_loop._combined_loader
        assert combined is not None
        loaders = combined.flattened
        with self.precision_plugin.predict_step_context():
            # With several loaders, Lightning passes the index of the loader as the last argument.
            return self._run_step(loaders[args[-1] if len(loaders) > 1 else 0], self._module.predict_step, *args)

    def _run_step(self, loader: object, step: Any, *args: Any) -> Any:
        """Runs an evaluation or prediction step; returns None if this rank has no sample in the loader's next batch."""
        self.share = loader.next_share() if isinstance(loader, ManagedLoader) else EVEN_SHARE
        return None if self.share.is_empty else self._run_local_step(step, *args)

    def _run_local_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a step that other ranks may skip."""
        self._skips_collectives = self.share.has_empty_rank
        try:
            return step(*args, **kwargs)
        finally:
            self._skips_collectives = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks.

        Within a training step, a mean is weighted by the ranks' shares. In a step in which some rank has no sample,
        the tensor is returned unchanged.
        """
        if self._skips_collectives or not isinstance(tensor, Tensor):
            return tensor
        is_mean = str(reduce_op).lower() in ("mean", "avg") or reduce_op == torch.distributed.ReduceOp.AVG
        if self._metric_weight != 1 and is_mean:
            tensor = tensor * self._metric_weight
        operation = "sum" if is_mean else reduce_op
        if isinstance(operation, str):
            operation = getattr(torch.distributed.ReduceOp, operation.upper())
        # Lightning (2.6) would call `barrier` before, in which the host waits for a GPU.
        torch.distributed.all_reduce(tensor, operation, group)
        return tensor.copy_(tensor / torch.distributed.get_world_size(group)) if is_mean else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._skips_collectives:
            raise RuntimeError(
                "all_gather in a step in which a rank has no sample would wait forever. "
                "DataLoader(drop_last=True), or a --global_batch_size that divides the number of samples, avoids it"
            )
        return super().all_gather(tensor, group, sync_grads)


def _on_host(value: Any) -> Any:
    """Returns a value with its tensors on the CPU: each rank would unpickle a CUDA tensor on the sender's device."""
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().cpu())


def _trainable_ids(module: LightningModule) -> set[int]:
    """Returns the `id` of each parameter that is not frozen."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def average_gradients(parameters: Iterable[Parameter], world_size: int) -> None:
    """Averages gradients as `average_in_buckets` does, also sparse ones. All ranks must call.

    A gradient that is sparse on some rank becomes sparse on all ranks, without the rows that are 0.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    own = [int(each.grad is not None and each.grad.is_sparse) for each in trained]
    is_sparse = torch.tensor(own, device=trained[0].device)
    torch.distributed.all_reduce(is_sparse, torch.distributed.ReduceOp.MAX)
    average_in_buckets(buckets_of(trained), world_size)
    for parameter, becomes_sparse in zip(trained, is_sparse.tolist(), strict=True):
        if becomes_sparse and parameter.grad is not None:
            parameter.grad = parameter.grad.to_sparse(1)  # one index per row, as in the gradient of an Embedding


def average_in_buckets(buckets: Sequence[Sequence[Parameter]], world_size: int) -> None:
    """Replaces each gradient with its mean over ranks; a missing gradient counts as 0. All ranks must call.

    The buckets are the same on all ranks, and the parameters of a bucket have one dtype. A gradient that is missing on
    every rank stays missing, so the optimizer skips the parameter as it would in one process.
    """
    pending = []
    for bucket in buckets:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in bucket]
        exists = bucket[0].new_tensor([each.grad is not None for each in bucket])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), exists]).div_(world_size)
        pending.append((bucket, flat, torch.distributed.all_reduce(flat, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        *means, exists = flat.split([*(each.numel() for each in bucket), len(bucket)])
        for index, (parameter, mean) in enumerate(zip(bucket, means, strict=True)):
            if parameter.grad is None and not exists[index]:  # waits for a GPU, only if the gradient is missing here
                continue
            mean = mean.view_as(parameter)
            parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter).copy_(mean)


def buckets_of(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Groups parameters by dtype, and those of a dtype into buckets of about `BUCKET_BYTES`."""
    buckets: list[list[Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[Parameter], int]] = {}
    for parameter in parameters:
        bucket, size = open_buckets.get(parameter.dtype, ([], BUCKET_BYTES))
        if size >= BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[parameter.dtype] = bucket, size + parameter.numel() * parameter.element_size()
    return buckets
