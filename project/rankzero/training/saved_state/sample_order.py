"""What a checkpoint says of the order of samples; `rankzero.sampling.resumed_order` reads it."""

from typing import Any

from lightning.pytorch import Trainer

from rankzero.sampling.plan import SamplingPlan
from rankzero.training.fit_loop import fit_loop_of


def order_of(trainer: Trainer, plan: SamplingPlan) -> dict[str, Any] | None:
    """What the order of samples is made of, and how far it has come. Free of ranks; None where it is not ours."""
    if plan.order is None:
        return None
    loop = fit_loop_of(trainer)
    return {
        "positions": [vars(loop.position_of(order)) for order in plan.training],
        "seed": plan.seed,
        "global_batch_sizes": [sampler.global_batch_size for sampler in plan.training],
        "data": plan.data,
    }
