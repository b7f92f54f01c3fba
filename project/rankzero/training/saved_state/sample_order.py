"""The order of samples as a checkpoint records it; `rankzero.sampling.resumed_order` reads the record."""

from typing import Any

from lightning.pytorch import Trainer

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of


def order_of(trainer: Trainer, plan: SamplingPlan) -> dict[str, Any] | None:
    """Returns the order of samples and the position in it, independent of the rank; None if the order is the user's."""
    if plan.order is None:
        return None
    loop = fit_loop_of(trainer)
    return {
        "positions": [vars(loop.position_of(order)) for order in plan.training_orders],
        "seed": plan.seed,
        "global_batch_sizes": [sampler.global_batch_size for sampler in plan.training_orders],
        "data": plan.data,
    }
