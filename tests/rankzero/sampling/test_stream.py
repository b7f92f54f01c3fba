import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from rankzero.messages import RunError
from rankzero.sampling import generators
from rankzero.sampling.stream import Stream, StreamLoader
from running import on_each_rank
from stock import Unsized


class Rows(IterableDataset):
    """Yields the numbers from `start` on, in a random order and with noise if it `draws`."""

    epoch = None

    def __init__(self, count, start=0, draws=False):
        self.numbers, self.draws = range(start, start + count), draws

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        numbers = list(self.numbers)
        if self.draws:
            random.shuffle(numbers)
        for number in numbers:
            noise = np.random.rand() + torch.rand(()).item() if self.draws else 0.0
            yield torch.tensor([number, noise])


class Stateful(Rows):
    next = 0

    def __iter__(self):
        for position in range(self.next, len(self.numbers)):
            self.next = position + 1
            yield torch.tensor([self.numbers[position], 0.0])
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Exchange:
    """Gathers values of ranks that run in threads."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size, timeout=30), [None] * size

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def begin_gather(self, rank, row):
        rows = torch.stack(self.gather(rank, row))
        return SimpleNamespace(wait=lambda: rows)


def read_on_ranks(datasets, after=None, kept=None, epoch=3, is_padded=False, **settings):
    """Returns what each rank reads, with its shares, and the states after `after` batches; or errors."""
    exchange = Exchange(len(datasets))

    def read(rank):
        gathers = (lambda value: exchange.gather(rank, value)), (lambda row: exchange.begin_gather(rank, row))
        try:
            source = DataLoader(datasets[rank], **{"batch_size": 4, **settings})
            stream = Stream(source, rank, 5, kept, lambda: epoch, *gathers)
            stream.is_padded, found, state = is_padded, [], None
            for number, batch in enumerate(StreamLoader(source, stream), 1):
                found.append((batch, None if batch is None else stream.next_share()))
                state = stream.state(True) if number == after else state
            return found, state
        except Exception:
            exchange.barrier.abort()
            raise

    return on_each_rank(range(len(datasets)), read)


def numbers_in(found):
    return [batch[:, 0].tolist() if len(batch) else [] for batch, _ in found]


@pytest.mark.parametrize("counts", [(8, 8), (10, 3), (0, 9), (5, 0, 12)])
def test_ranks_with_fewer_samples_take_part_until_all_have_ended(counts):
    ranks = [found for found, _ in read_on_ranks([Rows(count, 100 * rank) for rank, count in enumerate(counts)])]
    steps = -(-max(counts) // 4)
    for rank, (found, count) in enumerate(zip(ranks, counts, strict=True)):
        assert [int(number) for batch in numbers_in(found) for number in batch] == [
            *range(100 * rank, 100 * rank + count)
        ]
        assert len(found) == steps
    for step in range(steps):
        sizes = [len(numbers_in(found)[step]) for found in ranks]
        shares = [found[step][1] for found in ranks]
        assert [share.samples for share in shares] == sizes and {share.total for share in shares} == {sum(sizes)}
        assert [share.is_empty for share in shares] == [size == 0 for size in sizes]
        weights = [size * len(counts) / sum(sizes) for size in sizes]
        assert [share.loss_weight for share in shares] == [share.metric_weight for share in shares] == weights


def test_an_empty_batch_has_the_structure_of_the_last_one_of_this_rank():
    (_, (found, _)) = read_on_ranks([Rows(8), Rows(4)])
    assert [tuple(batch.shape) for batch, _ in found] == [(4, 2), (0, 2)]


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [Rows(20), Rows(9, 100)],
        lambda: [Stateful(20), Stateful(9, 100)],
        lambda: [Rows(20, draws=True)],  # in one thread, because threads share the generators
    ],
    ids=["again", "state", "draws"],
)
def test_a_resumed_epoch_continues_after_any_batch(make, after, capsys):
    whole = read_on_ranks(make(), after)
    resumed = read_on_ranks(make(), kept=whole[0][1], epoch=9)
    for (expected, _), (found, _) in zip(whole, resumed, strict=True):
        assert [[*map(list, batch)] for batch, _ in found] == [[*map(list, batch)] for batch, _ in expected[after:]]
        assert [share for _, share in found] == [share for _, share in expected[after:]]
    skips = f"skipped {after} batches of Rows that epoch 4 has already used in" in capsys.readouterr().out
    assert skips == (type(make()[0]) is Rows)


def test_generators_are_those_of_the_training_unless_only_a_dataset_draws():
    """Without draws, the generators have the states that a DataLoader leaves; draws of a data set change no state."""
    states = []
    for dataset, reads in ((Rows(9), False), (Rows(9), True), (Rows(9, draws=True), True)):
        generators.seed(7)
        if reads:
            ((found, _),) = read_on_ranks([dataset])
            assert len(found) == 3
        else:
            list(DataLoader(dataset, batch_size=4))
        states.append(generators.draw())
    assert states[0] == states[1] == states[2]


def test_a_dataset_learns_the_epoch():
    dataset = Rows(2)
    read_on_ranks([dataset], epoch=6)
    assert dataset.epoch == 6


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ("mine", "in __iter__, itertools.islice(samples, rank * workers + worker, None, world_size * workers)"),
        ("datasets.iterable_dataset", "split_dataset_by_node(dataset, trainer.global_rank, trainer.world_size)"),
        ("webdataset.compat", "nodesplitter=webdataset.split_by_node"),
    ],
)
def test_ranks_that_read_the_same_first_batch_are_named_with_what_divides_their_samples(monkeypatch, package, advice):
    monkeypatch.setattr(Rows, "__module__", package)
    with pytest.warns(UserWarning, match="first batch of Rows is the same on rank 0, rank 2") as warned:
        read_on_ranks([Rows(8), Rows(8, 8), Rows(12)])
    assert advice in str(warned[0].message)


def test_workers_that_read_the_same_first_batch_are_named():
    with pytest.warns(UserWarning, match=r"same on rank 0 \(worker 0\), rank 0 \(worker 1\)"):
        read_on_ranks([Rows(4)], num_workers=2)


def test_a_rank_that_needs_a_sample_gets_its_last_batch_again_without_weight():
    with pytest.warns(UserWarning, match="these ranks use their last batch more than once"):
        _, (found, _) = read_on_ranks([Rows(12), Rows(4, 50)], is_padded=True)
    assert numbers_in(found) == [[50.0, 51.0, 52.0, 53.0]] * 3
    assert [(share.loss_weight, share.is_empty) for _, share in found] == [(1.0, False), (0.0, False), (0.0, False)]
    errors = read_on_ranks([Rows(12), Rows(0)], is_padded=True)
    assert isinstance(errors[1], RunError) and "rank 1 has no batch of Rows" in str(errors[1])


def test_a_batch_that_the_collate_function_omits_is_skipped_or_empty():
    def without(numbers):
        return lambda rows: None if int(rows[0][0]) in numbers else torch.stack(rows)

    one, other = read_on_ranks([Rows(12), Rows(12, 100)], collate_fn=without({0, 100, 104}))
    assert [batch is None for batch, _ in one[0]] == [batch is None for batch, _ in other[0]] == [True, False, False]
    assert [len(batch) for batch, _ in other[0][1:]] == [0, 4] and other[0][1][1].is_empty


def test_batches_that_the_dataset_makes_have_the_same_weight():
    def batches(*sizes):
        return Unsized([torch.zeros(size, 2) + size for size in sizes])

    (one, _), (other, _) = read_on_ranks([batches(8, 2), batches(4, 6, 3)], batch_size=None)
    assert [share.loss_weight for _, share in one] == [1.0, 1.0, 0.0]
    assert [share.loss_weight for _, share in other] == [1.0, 1.0, 2.0]
    assert [share.total for _, share in one] == [12, 8, 3]


def test_a_loader_with_a_length_has_that_of_the_longest_rank():
    class Sized(Rows):
        def __len__(self):
            return len(self.numbers)

    assert [len(batches) for batches, _ in read_on_ranks([Sized(12), Sized(5)])] == [3, 3]
    loader = DataLoader(Sized(12), batch_size=4)
    stream = StreamLoader(loader, Stream(loader, 0, 0, None, int, lambda length: [length, 5], None))
    assert len(stream) == 5 and isinstance(stream, DataLoader) and stream.dataset is loader.dataset
    with pytest.raises(TypeError):
        len(StreamLoader(loader, Stream(loader, 0, 0, None, int, lambda length: [length, None], None)))
