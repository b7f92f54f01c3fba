from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from rankzero.messages import RequestError
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.fingerprint import fingerprint
from rankzero.sampling.plan import SamplingPlan, resume_order
from stock import Unsized

DATA = TensorDataset(torch.arange(100))
LOADER = DataLoader(DATA, batch_size=8, shuffle=True)
BATCH_SAMPLER = BatchSampler(DistributedSampler(DATA, 2, 0), 8, False)


def drawn(loader):
    return [batch[0].tolist() for batch in loader]


def test_the_runs_order_replaces_that_of_the_loader_which_without_shuffle_reads_samples_in_order():
    ranks = [SamplingPlan(rank, 2).wrap(LOADER, training=True) for rank in range(2)]
    batches = [drawn(loader) for loader in ranks]
    assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(100))
    assert all(len(batch) == 8 for rank in batches for batch in rank[:-1])
    assert ranks[0].dataset is DATA
    for shares in ((0, 1), (1, 0), (0, 0)):
        dividing = [DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 2, share)) for share in shares]
        batches = [drawn(SamplingPlan(rank, 2).wrap(dividing[rank], training=True)) for rank in range(2)]
        assert sorted(i for rank in batches for batch in rank for i in batch) == list(range(100))
    for size, batches in ((50, [[*range(50)], [*range(50, 100)]]), (512, [[*range(100)]])):
        assert drawn(SamplingPlan().wrap(DataLoader(DATA, batch_size=size), training=True)) == batches


def test_other_attributes_of_the_loader_are_kept():
    def collate(samples):
        return [torch.stack([sample[0] for sample in samples])]

    class Loader(DataLoader):
        def __init__(self, data, name, **options):
            super().__init__(data, **options)
            self.name = name

    with _replace_dunder_methods(DataLoader, "dataset"):  # as Lightning does while loaders are created
        loader = Loader(DATA, "mine", batch_size=8, collate_fn=collate, num_workers=1, persistent_workers=True)
        positional = DataLoader(DATA, 32, True)
    managed = SamplingPlan(0, 2).wrap(loader, training=False)
    assert managed.name == "mine" and managed.collate_fn is collate
    assert managed.num_workers == 1 and managed.persistent_workers and managed.batch_size == 8
    assert sorted(index for (batch,) in managed for index in batch.tolist()) == list(range(0, 100, 2))
    _shutdown_workers_and_reset_iterator(managed)
    batches = drawn(SamplingPlan().wrap(positional, training=True))
    assert sorted(index for batch in batches for index in batch) == [*range(100)]


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        *((SamplingPlan(0, 2), 16), (SamplingPlan(0, 2, batch_size=5), 10)),
        *((SamplingPlan(0, world, global_batch_size=size), size) for world, size in ((2, 30), (1, 30), (2, 7), (3, 2))),
        (SamplingPlan(0, 2, micro_batches=3), 48),
        (SamplingPlan(0, 2, batch_size=5, micro_batches=3), 30),
        (SamplingPlan(0, 2, global_batch_size=30, micro_batches=3), 30),
    ],
)
def test_the_global_batch_size_follows_from_flags_loader_and_world_size(plan, size):
    plan.wrap(LOADER, training=True)
    assert plan.order.global_batch_size == size


STREAM = Unsized(range(10))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(STREAM), "the iterable dataset Unsized"),
        (DataLoader(DATA, sampler=iter(range(5))), "the sampler range_iterator"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 3, 0)), "the sampler DistributedSampler"),
        (DataLoader(DATA, batch_sampler=BATCH_SAMPLER), "the batch sampler BatchSampler"),
        ([1, 2, 3], "a list"),
    ],
)
def test_a_loader_with_its_own_order_is_returned_unchanged_with_a_warning(loader, reason):
    with pytest.warns(UserWarning, match=f"{reason}.*does not guarantee"):
        assert SamplingPlan().wrap(loader, training=True) is loader


@pytest.mark.parametrize(
    ("plan", "asked", "instead"),
    [
        (SamplingPlan(batch_size=101), "", "--batch_size 100, or less"),
        (SamplingPlan(0, 2, batch_size=51), " on each of 2 processes, 102 in all", "--batch_size 50, or less"),
        (SamplingPlan(0, 2, global_batch_size=102), "", "--global_batch_size 100, or less"),
        (
            SamplingPlan(0, 2, batch_size=51, micro_batches=2),
            " on each of 2 processes in 2 batches a step, 204 in all",
            "--batch_size 25, or less",
        ),
    ],
)
def test_a_batch_larger_than_the_data_set_is_refused(plan, asked, instead):
    with pytest.raises(RequestError) as error:
        plan.wrap(DataLoader(DATA, batch_size=8), training=True)
    flag = f"--batch_size {plan.batch_size}" if plan.batch_size else f"--global_batch_size {plan.global_batch_size}"
    assert (error.value.asked, error.value.instead) == (flag + asked, instead)


def test_a_loader_without_any_batch_is_refused():
    empty = TensorDataset(torch.empty(0))
    for data, message in ((DATA, "100 training samples"), (empty, "training data set is empty")):
        with pytest.raises(RequestError, match=message):
            SamplingPlan(0, 2).wrap(DataLoader(data, batch_size=64, drop_last=True), training=True)


def resumed_plan(data, **settings):
    plan = SamplingPlan(**settings)
    plan.start_positions, plan.kept_data, plan.kept_sizes = [Position(3, 5, 40)], fingerprint(data, len(data)), [8]
    return plan


@pytest.mark.parametrize(("count", "text"), [(90, "samples: was 90, is 100"), (100, "tensors: was ")])
def test_a_run_resumes_with_changed_data_only_if_accepted_and_restarts_its_epoch(count, text):
    checkpoint_data = TensorDataset(torch.arange(1000, 1000 + count))
    with pytest.raises(RequestError, match=f"some samples would be repeated(?s:.*){text}(?s:.*)restart the epoch"):
        resumed_plan(checkpoint_data).wrap(LOADER, training=True)
    plan = resumed_plan(checkpoint_data)
    plan.start_positions = [Position(4)]
    with pytest.raises(RequestError, match=f"has changed\\n(?s:.*){text}(?s:.*)begin the next epoch"):
        plan.wrap(LOADER, training=True)
    plan = resumed_plan(checkpoint_data, accept_changed_data=True)
    batches = drawn(plan.wrap(LOADER, training=True))
    assert plan.order.epoch == 3 and sorted(i for batch in batches for i in batch) == [*range(100)]


def test_a_checkpoint_knows_the_data_of_the_last_reload_and_the_next_epoch_may_load_other_data():
    plan, shards = SamplingPlan(reloads_data=True), [TensorDataset(torch.arange(start, start + 8)) for start in (0, 8)]
    for shard in shards:
        list(plan.wrap(DataLoader(shard, 4), training=True))
    assert plan.data == fingerprint(shards[1], 8)
    for position, is_refused in ((Position(2), False), (Position(1, 1, 4), True)):
        plan = resumed_plan(shards[0], reloads_data=True)
        plan.start_positions = [position]
        with pytest.raises(RequestError, match="data has changed") if is_refused else nullcontext():
            plan.wrap(DataLoader(shards[1], 4), training=True)


def test_several_training_loaders_are_padded_keep_their_batch_sizes_and_replace_those_of_an_earlier_training():
    plan = SamplingPlan(0, 2)
    plan.start_positions = [Position(3)]  # as after a checkpoint of stock Lightning
    loaders = [plan.wrap(DataLoader(DATA, batch_size=size), training=True) for size in (9, 33)]
    assert [order.epoch for order in plan.training_orders] == [3, 3]
    assert plan.order.global_batch_size == 18 and [len(loader) for loader in loaders] == [6, 2]
    assert all(order.is_padded for order in plan.training_orders)
    plan = SamplingPlan()
    for _ in range(2):
        list(plan.wrap(DataLoader(DATA, batch_size=9), training=True))
    assert len(plan.training_orders) == 1
    plan = SamplingPlan(0, 2, max_device_batch_size=10)
    plan.wrap(DataLoader(DATA, batch_size=9), training=True)
    with pytest.raises(RequestError, match="several training loaders"):  # with different micro-batches
        plan.wrap(DataLoader(DATA, batch_size=33), training=True)


def test_a_loader_next_to_an_unmanaged_training_loader_is_padded_and_padding_an_empty_rank_gives_a_warning():
    plan = SamplingPlan(0, 2)
    plan.wrap(DataLoader(DATA, batch_size=9), training=True)
    assert plan.only_order and not plan.order.is_padded
    plan.wrap(DataLoader(STREAM), training=False)
    assert plan.only_order
    plan.wrap(DataLoader(STREAM), training=True)
    assert not plan.only_order and plan.order.is_padded
    plan.wrap(DataLoader(STREAM), training=False)
    assert plan.order.is_padded
    with pytest.warns(UserWarning, match="each process needs a sample for SyncBatchNorm"):
        SamplingPlan(0, 2, global_batch_size=33).wrap(LOADER, training=True, padded_for="SyncBatchNorm")


STATE = {"epoch": 1, "batches": 7, "states": [], "readers": [2, 0]}


@pytest.mark.parametrize(
    ("world_size", "state", "accepts", "expected"),
    [
        (2, STATE, False, STATE),
        (3, STATE, True, None),
        (3, STATE | {"batches": 0}, False, None),  # an epoch has ended, so that any processes can begin the next one
        (3, STATE, False, "to resume with 3 processes with 0 loader processes each"),
        (2, STATE | {"readers": [2, 4]}, False, "2 processes with 4 loader processes each have read 7 batches"),
    ],
)
def test_only_as_many_processes_continue_a_stream_within_an_epoch(world_size, state, accepts, expected):
    plan = SamplingPlan(0, world_size, accept_changed_data=accepts)
    plan.kept_streams, kept = [state], []

    def stream(loader, state):
        kept.append(state)
        return SimpleNamespace(stream=SimpleNamespace(has_started=True))

    if isinstance(expected, str):
        with pytest.raises(RequestError, match=expected) as caught:
            plan.wrap(DataLoader(STREAM), training=True, stream=stream)
        assert "--accept_changed data, to read the stream from its beginning" in caught.value.instead
        return
    plan.wrap(DataLoader(STREAM), training=True, stream=stream)
    assert kept == [expected]
    plan.wrap(DataLoader(STREAM), training=True, stream=stream)  # Lightning reloads the loader
    assert len(plan.streams) == plan.unmanaged_loaders == 1


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
    assert "its stored sample order is damaged (" in error.value.found
    assert all(key in str(error.value) for key in missing)
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
    order = {"global_batch_sizes": [8, 4], "positions": [POSITION, {**POSITION, "pass_index": 2}]}
    plan = SamplingPlan(seed=7)
    resume(plan, manifest(**order))
    assert (plan.start_positions, plan.kept_sizes) == ([Position(3, 5, 40), Position(3, 5, 40, 2)], [8, 4])
    resume(plan, manifest(**order), accepts=True)
    assert plan.start_positions == [Position(3), Position(3)]
