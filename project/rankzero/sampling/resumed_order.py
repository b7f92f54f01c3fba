"""Applies the order of samples that a checkpoint stores to the resumed run."""

from typing import Any

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan

_ANEW = "--resume never to start anew"


def resume_order(plan: SamplingPlan, manifest: dict[str, Any], run: str, accepts_another_batch: bool) -> str | None:
    """Makes a resumed run keep its global batch size, seed and data, because another order would repeat samples.

    Args:
        plan: The run's sampling plan, before it has wrapped a loader.
        manifest: The checkpoint's manifest.
        run: Name of the run.
        accepts_another_batch: Whether `--accept_changed global_batch_size` was given.

    Returns:
        A note for the user, or None.

    Raises:
        RequestError: Another order was requested and not accepted, or the checkpoint's order is invalid.
    """
    kept = (manifest.get("rankzero") or {}).get("order")
    if not kept:
        plan.start = [Position(manifest["epoch"])] if manifest.get("epoch") else []
        return None
    try:
        seed, sizes = _number(kept["seed"]), [_number(size, least=1) for size in kept["global_batch_sizes"]]
        plan.kept_data = None if kept["data"] is None else dict(kept["data"])
        plan.start = [_position(stored) for stored in kept["positions"]]
        first = sizes[0]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"the order of samples that it was saved in is not whole ({error!r})"
        raise RequestError("to carry on from this checkpoint", found, f"another one, or {_ANEW}") from None
    if plan.seed != seed:
        raise RequestError(f"--seed {plan.seed}", f"run {run} carries on with {seed}", f"--seed {seed}, or {_ANEW}")
    if accepts_another_batch:
        if len(sizes) > 1:  # several loaders would get out of step, so the epoch restarts
            plan.start = [Position(position.epoch) for position in plan.start]
        return None
    plan.kept_sizes = sizes
    if plan.global_batch_size not in (None, first):
        raise RequestError(
            f"--global_batch_size {plan.global_batch_size}",
            f"run {run} carries on with {first}",
            f"--global_batch_size {first}, or --accept_changed global_batch_size to change it, or {_ANEW}",
        )
    asked = (plan.batch_size or 0) * plan.world_size * plan.micro_batches
    if asked in (0, first):
        return None
    return (
        f"--batch_size {plan.batch_size} would be {asked:,} samples a step; run {run} carries on with {first:,}, "
        "or else with --accept_changed global_batch_size"
    )


def _position(stored: dict[str, int]) -> Position:
    """Returns a position that a checkpoint stores; versions before 0.2 named its `pass_index` `cycle`."""
    return Position(**{"pass_index" if name == "cycle" else name: _number(value) for name, value in stored.items()})


def _number(value: object, least: int = 0) -> int:
    """Returns a stored number after a check.

    Raises:
        ValueError: The value is not an integer from `least` to 2^63 - 1.
    """
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number from {least}")
    return value
