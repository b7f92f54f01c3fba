"""Collections of several ranks, compared with a direct computation."""

import torch
from torch.nn import functional as F

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.figures.collection import Collection, CollectionError
from rankzero.training.ddp import DataParallel
from rankzero.training.strategies import OneProcess

COUNT, CLASSES = 40, 4
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.randn(COUNT, CLASSES, generator=GENERATOR)
TARGETS = torch.randint(CLASSES, (COUNT,), generator=GENERATOR)
IMAGES = torch.arange(float(COUNT))[:, None, None, None].expand(COUNT, 3, 2, 2)
OUTPUTS = {
    "three": {"logits": torch.eye(3), "targets": torch.arange(3)},
    "two": {"logits": torch.eye(2), "targets": torch.arange(2)},
    "pairs": {"predictions": torch.ones(3), "targets": torch.ones(3)},
    "error": {"logits": torch.eye(3), "targets": torch.full((3,), 7)},
    "other": {"loss": 1.0},
}


def exchange(strategy, collection):
    """Returns plain values of the combined outputs, or the message of an error."""
    try:
        found = collection.exchange(strategy)
    except CollectionError as error:
        return str(error)
    if found is None:
        return None
    if found.pairs is not None:
        return sorted(found.pairs.true.tolist()), found.pairs.total
    worst = [(int(sample.image[0, 0, 0]), sample.true, sample.predicted) for sample in found.worst]
    return found.counts.matrix.tolist(), found.counts.micro_average.true_positives.tolist(), worst


def add_samples(collection, share):
    for part in torch.arange(*share).split(7):
        if len(part):
            collection.add({"logits": LOGITS[part], "targets": TARGETS[part]}, {"x": IMAGES[part], "y": TARGETS[part]})


def add_values(collection, share):
    samples = torch.arange(*share)
    collection.add({"predictions": samples + 1.0, "targets": samples.float()}, None)


def add_outputs(collection, kinds):
    for kind in kinds:
        collection.add(OUTPUTS[kind], None)


def collect(coordinator, add, cases):
    """Exchanges a collection for each case, to which `add` adds this rank's part of the case."""
    rank, results = coordinator.launch.rank, []
    strategy = DataParallel(SamplingPlan(), coordinator, process_group_backend="gloo")
    strategy.parallel_devices = [torch.device("cpu")]
    for case in cases:
        collection = Collection(2, rank)
        add(collection, case[rank])
        results.append(exchange(strategy, collection))
    return results


def expected_classification():
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for true, predicted in zip(TARGETS.tolist(), LOGITS.argmax(1).tolist(), strict=True):
        matrix[true, predicted] += 1
    own = LOGITS.softmax(1).gather(1, TARGETS[:, None])
    positives = [int((own >= threshold).sum()) for threshold in torch.linspace(0, 1, 100)]
    worst = F.cross_entropy(LOGITS, TARGETS, reduction="none").argsort(descending=True)[:16].tolist()
    return matrix.tolist(), positives, [(i, int(TARGETS[i]), int(LOGITS[i].argmax())) for i in worst]


SHARES = [((0, end), (end, COUNT)) for end in (27, 0, 40)]
"""First sample and end of the samples of both ranks; a rank may have none."""


def test_collections_of_two_ranks_equal_a_direct_computation(on_ranks):
    assert on_ranks(collect, 2, add_samples, SHARES) == [[expected_classification()] * 3] * 2
    values = list(map(float, range(COUNT))), COUNT
    assert on_ranks(collect, 2, add_values, SHARES[:2]) == [[values] * 2] * 2


UNEQUAL = {
    "2 classes and 3 classes on different ranks": (["three"], ["two"]),
    "2 classes and predictions on different ranks": (["pairs"], ["two"]),
    "rank 1 could not collect": (["three"], ["error", "three"]),
    "logits for 3 and 2 classes": (["three", "two"], []),
    "logits for some batches and predictions for others": (["three", "pairs"], ["three"]),
}


def test_outputs_that_cannot_be_combined_are_reported_on_all_ranks_and_others_are_no_outputs(on_ranks):
    (*first, of_others), (*second, others) = on_ranks(collect, 2, add_outputs, [*UNEQUAL.values(), (["other"], [])])
    assert of_others is others is None
    for message, found, found_on_other_rank in zip(UNEQUAL, first, second, strict=True):
        assert message in found and (message in found_on_other_rank or "see logs/rank-000.log" in found_on_other_rank)


def test_a_single_process_without_a_group_collects_everything():
    collection = Collection(1, 0)
    add_samples(collection, (0, COUNT))
    assert exchange(OneProcess(SamplingPlan(), device="cpu"), collection) == expected_classification()
