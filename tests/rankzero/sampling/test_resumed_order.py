"""A resumed run keeps its order of samples; a request for another order is refused."""

import pytest
from torch.utils.data import DataLoader

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.plan import SamplingPlan, resume_order

POSITION = {"epoch": 3, "step": 5, "samples": 40, "pass_index": 0}
ORDER = {"seed": 7, "global_batch_sizes": [8], "data": {"samples": "100"}, "positions": [POSITION]}


def manifest(**order):
    return {"epoch": 3, "step": 29, "rankzero": {"order": {**ORDER, **order}}}


def resume(plan, content, accepts=False):
    return resume_order(plan, content, "x", accepts)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_resumed_run_continues_with_the_next_batch_of_the_stored_size(world):
    plan = SamplingPlan(seed=7)
    assert resume(plan, manifest()) is None
    assert (plan.start_positions, plan.kept_sizes, plan.kept_data) == ([Position(3, 5, 40)], [8], {"samples": "100"})

    def read(rank, batch_size, *manifests):
        plan = SamplingPlan(rank, world, seed=7)
        for content in manifests:
            assert resume(plan, content) is None
        loader = plan.wrap(DataLoader(list(range(96)), batch_size=batch_size, shuffle=True), training=True)
        plan.order.set_epoch(3)
        assert len(loader) == 4
        return [batch.tolist() for batch in loader]

    order = {"global_batch_sizes": [24], "data": None, "positions": [{"epoch": 3, "step": 2, "samples": 48}]}
    for rank in range(world):
        assert read(rank, 5, manifest(**order)) == read(rank, 24 // world)[2:]


@pytest.mark.parametrize("record", [None, {}, {"order": None}, {"order": {}}])
@pytest.mark.parametrize(("epoch", "start"), [(None, []), (0, []), (3, [Position(3)])])
def test_a_checkpoint_without_an_order_restarts_its_epoch(record, epoch, start):
    plan = SamplingPlan(seed=7, global_batch_size=9)
    assert resume(plan, {}) is None and plan.start_positions == []  # a run without a manifest
    assert resume(plan, {"epoch": epoch, "rankzero": record}) is None
    assert (plan.start_positions, plan.kept_sizes, plan.kept_data) == (start, [], None)


DAMAGED = [
    *({**ORDER, "seed": seed} for seed in (None, "7")),
    *({**ORDER, "global_batch_sizes": sizes} for sizes in ([], 8, [0])),
    {**ORDER, "data": "abc"},
    *({**ORDER, "positions": positions} for positions in (None, [3], [{**POSITION, "samples": -1}])),
    *({name: value for name, value in ORDER.items() if name != key} for key in ORDER),
    "text",
]


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("order", DAMAGED, ids=str)
def test_the_refusal_of_a_damaged_order_names_a_missing_part_and_suggests_resume_never(order, accepts):
    with pytest.raises(RequestError) as error:
        resume(SamplingPlan(seed=7), {"epoch": 3, "step": 29, "rankzero": {"order": order}}, accepts)
    missing = [key for key in ORDER if isinstance(order, dict) and key not in order]
    assert "its stored sample order is damaged (" in error.value.found and all(
        key in str(error.value) for key in missing
    )
    assert error.value.instead.endswith("--resume never to restart the run")


@pytest.mark.parametrize(
    ("plan", "samples"),
    [
        (SamplingPlan(seed=7, batch_size=8), None),
        (SamplingPlan(0, 2, seed=7, batch_size=4), None),
        (SamplingPlan(0, 2, seed=7, batch_size=2, micro_batches=2), None),
        (SamplingPlan(seed=7, batch_size=4), "4"),
        (SamplingPlan(0, 3, seed=7, batch_size=8), "24"),
        (SamplingPlan(0, 2, seed=7, batch_size=600, micro_batches=3), "3,600"),
    ],
)
def test_a_batch_size_that_changes_the_global_batch_size_is_reported_and_ignored(plan, samples):
    note = resume(plan, manifest())
    assert plan.kept_sizes == [8] and (note is None) == (samples is None)
    if note:
        expected = f"--batch_size {plan.batch_size} would be {samples} samples a step; run x resumes with 8"
        assert note.startswith(expected) and note.endswith("--accept_changed global_batch_size changes it")
    assert resume(plan, manifest(), accepts=True) is None


def test_several_loaders_restart_their_epoch_with_another_global_batch_size():
    """In the middle of the epoch, the loaders would get out of step."""
    second_position = {**POSITION, "pass_index": 2}
    order = {"global_batch_sizes": [8, 4], "positions": [POSITION, second_position]}
    plan = SamplingPlan(seed=7)
    resume(plan, manifest(**order))
    assert (plan.start_positions, plan.kept_sizes) == ([Position(3, 5, 40), Position(3, 5, 40, 2)], [8, 4])
    resume(plan, manifest(**order), accepts=True)
    assert plan.start_positions == [Position(3), Position(3)]
