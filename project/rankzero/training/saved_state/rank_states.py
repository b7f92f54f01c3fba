"""State that differs between ranks: random generators, and metrics accumulated within an epoch."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from rankzero.sampling import generators
from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of
from rankzero.training.hooks import LoopCallback
from rankzero.training.lightning_inside import set_update_count, shown_metrics
from rankzero.training.metrics import epoch_averages
from rankzero.training.strategies import strategy_of

State = dict[str, Any]


class RankStates(LoopCallback):
    """Saves and restores the generators and accumulated metrics of each rank.

    If the world size has changed, generators are reseeded from seed, step and rank, and metrics are merged.
    """

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._loaded: list[State] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Saves the states of all ranks. All ranks must call."""
        epoch_loop = fit_loop_of(trainer).epoch_loop
        epoch_loop.flush_metrics()  # the shown metrics are saved too
        checkpoint["rank_states"] = strategy_of(trainer).gather_on_rank_zero(
            {
                "generators": save_generators(trainer.strategy.root_device),
                "shown": {kind: dict(metrics) for kind, metrics in shown_metrics(trainer).items()},
                "gathered": epoch_averages.gathered_values(epoch_loop.results),
                "metrics": save_metrics(pl_module),
                "interval": epoch_loop.record.state(epoch_loop.is_within_step),
            }
        )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("rank_states")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the states of a run that was only restored."""
        self.on_ready(trainer)

    def on_ready(self, trainer: Trainer) -> None:
        if not self._loaded:
            return
        # Error feedback belongs to DDP's buckets, which DDP rebuilds in the first step after each start.
        for _, state in getattr(trainer.strategy.model, "_comm_hooks", []):
            if hasattr(state, "error_dict"):
                rank_zero_warn(f"rankzero: the error feedback of {type(state).__name__} restarts from zero")
        states, self._loaded = self._loaded, None
        is_same_world = len(states) == self.plan.world_size
        rank_state = states[self.plan.rank] if is_same_world else states[0]
        for kind, metrics in shown_metrics(trainer).items():
            metrics.clear()
            metrics.update(rank_state["shown"][kind])
        if is_same_world:
            load_generators(rank_state["generators"], trainer.strategy.root_device)
        else:
            entropy = [self.plan.seed, trainer.global_step, self.plan.rank]
            seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
            generators.seed(seed)
            torch.cuda.manual_seed(seed)
        # If the world size has changed, rank zero continues with all ranks' metrics; the other ranks start empty.
        inherited_states = [rank_state] if is_same_world else states if self.plan.rank == 0 else []
        fit_loop_of(trainer).epoch_loop.record.load_states([state["interval"] for state in inherited_states])
        if fit_loop_of(trainer).is_within_epoch:
            resumed_values = epoch_averages.merge([state["gathered"] for state in inherited_states])
            fit_loop_of(trainer).epoch_loop.results.resumed_values = resumed_values
            load_metrics(trainer.lightning_module, [state["metrics"] for state in inherited_states])


def save_generators(device: torch.device) -> State:
    """Returns the states of this process's random generators, as tensors and plain types."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    state: State = {"python": [python[0], torch.tensor(python[1]), python[2]], "torch": torch.get_rng_state()}
    if numpy["bit_generator"] == "MT19937":  # the user must save any other generator
        words = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
        state["numpy"] = [words, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores the states of this process's random generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        words, position, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", words.numpy().astype(np.uint32), position, has_gauss, gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def save_metrics(module: LightningModule) -> dict[str, State]:
    """Returns the states of all torchmetrics metrics that have been updated, by their names in the module."""
    for collection in module.modules():
        if isinstance(collection, MetricCollection):
            list(collection.values(copy_state=False))  # makes all metrics of a group refer to one state
    return {
        name: {"updates": metric.update_count, "state": metric.metric_state}
        for name, metric in _metrics(module).items()
        if metric.update_count
    }


def load_metrics(module: LightningModule, saved: Sequence[Mapping[str, State]]) -> None:
    """Restores the states of metrics and merges the states of several ranks."""
    for name, metric in _metrics(module).items():
        states = [rank_metrics[name] for rank_metrics in saved if name in rank_metrics]
        for state in states[:1]:
            for key, value in state["state"].items():
                # Metrics of one group share a saved state, and each metric updates its own in place: copy it.
                setattr(metric, key, value.clone() if isinstance(value, Tensor) else list(value))
            set_update_count(metric, state["updates"])
        try:
            for state in states[1:]:
                metric.merge_state(state["state"])
        except (RuntimeError, ValueError) as error:
            rank_zero_warn(
                f"rankzero: the state of the metric {name} could not be restored ({error}); "
                "its value of this epoch covers only the samples after the resume"
            )
            metric.reset()
        metric.to(module.device)


def _metrics(module: LightningModule) -> dict[str, Metric]:
    return {name: submodule for name, submodule in module.named_modules() if isinstance(submodule, Metric)}
