"""The order of samples that a resumed run takes over from its checkpoint."""

from typing import Any

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan

_ANEW = "--resume never to start anew"


def resume_order(plan: SamplingPlan, manifest: dict[str, Any], run: str, accepts_another_batch: bool) -> str | None:
    """Has a run that is carried on keep its order: global batch, seed and data; another one would repeat samples.

    Args:
        plan: The order, before any loader has been seen.
        manifest: What the checkpoint says of itself.
        run: The run's name.
        accepts_another_batch: Whether another global batch is accepted.

    Returns:
        What a person is to know, if anything.

    Raises:
        RequestError: Another order was asked for, and not accepted; or the checkpoint does not say a whole one.
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
        if len(sizes) > 1:  # loaders that would not stay side by side
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
    """A position as a checkpoint stores it; versions before 0.2 call its `pass_index` `cycle`."""
    return Position(**{"pass_index" if name == "cycle" else name: _number(value) for name, value in stored.items()})


def _number(value: object, least: int = 0) -> int:
    """Returns a stored number.

    Raises:
        ValueError: It is none, or none that a run could have stored.
    """
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number from {least}")
    return value
