"""Applies the order of samples that a checkpoint stores to the resumed run."""

from typing import Any

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan

_NEW_RUN = "--resume never to restart the run"


def resume_order(plan: SamplingPlan, manifest: dict[str, Any], run: str, accepts_batch_size_change: bool) -> str | None:
    """Makes a resumed run keep its global batch size, seed and data, because another order would repeat samples.

    Args:
        plan: The run's sampling plan, before it has wrapped a loader.
        manifest: The checkpoint's manifest.
        run: Name of the run.
        accepts_batch_size_change: Whether `--accept_changed global_batch_size` was given.

    Returns:
        A note for the user, or None.

    Raises:
        RequestError: Another order was requested and not accepted, or the checkpoint's order is invalid.
    """
    stored_order = order_in(manifest)
    if not stored_order:
        plan.start_positions = [Position(manifest["epoch"])] if manifest.get("epoch") else []
        return None
    try:
        seed = _checked_number(stored_order["seed"])
        sizes = [_checked_number(size, minimum=1) for size in stored_order["global_batch_sizes"]]
        plan.kept_data = None if stored_order["data"] is None else dict(stored_order["data"])
        plan.start_positions = [
            Position(**{name: _checked_number(value) for name, value in stored.items()})
            for stored in stored_order["positions"]
        ]
        kept_size = sizes[0]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"its stored sample order is damaged ({error!r})"
        raise RequestError("to resume from this checkpoint", found, f"another checkpoint, or {_NEW_RUN}") from None
    check_seed(plan, seed, run)
    plan.seed = seed
    if accepts_batch_size_change:
        if len(sizes) > 1:  # several loaders would get out of step, so the epoch restarts
            plan.start_positions = [Position(position.epoch) for position in plan.start_positions]
        return None
    plan.kept_sizes = sizes
    if plan.global_batch_size not in (None, kept_size):
        raise RequestError(
            f"--global_batch_size {plan.global_batch_size}",
            f"run {run} keeps its global batch size, {kept_size}",
            f"--global_batch_size {kept_size}, or --accept_changed global_batch_size to change it, or {_NEW_RUN}",
        )
    requested_size = (plan.batch_size or 0) * plan.world_size * plan.micro_batches
    if requested_size in (0, kept_size):
        return None
    return (
        f"--batch_size {plan.batch_size} would be {requested_size:,} samples a step; "
        f"run {run} resumes with {kept_size:,}; --accept_changed global_batch_size changes it"
    )


def order_in(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the order of samples that a checkpoint's manifest stores; empty if there is none."""
    return (manifest.get("rankzero") or {}).get("order") or {}


def check_seed(plan: SamplingPlan, seed: int | None, run: str) -> None:
    """Raises a RequestError if the user has set another seed than that of the run."""
    if plan.is_seeded and seed not in (None, plan.seed):
        found = f"run {run} keeps its seed, {seed}"
        raise RequestError(f"--seed {plan.seed}", found, f"--seed {seed}, --name ANOTHER-NAME, or {_NEW_RUN}")


def _checked_number(value: object, minimum: int = 0) -> int:
    """Returns a stored number after a check.

    Raises:
        ValueError: The value is not an integer from `minimum` to 2^63 - 1.
    """
    if type(value) is not int or not minimum <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number >= {minimum}")
    return value
