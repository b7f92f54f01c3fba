"""Collections of several ranks, compared with a direct computation."""

import pytest
import torch
from torch.nn import functional as F

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.figures.collection import Collection, CollectionError
from rankzero.training.ddp import DataParallel
from rankzero.training.strategies import OneProcess

COUNT, CLASSES = 40, 4


def data():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(COUNT, CLASSES, generator=generator)
    images = torch.arange(float(COUNT))[:, None, None, None].expand(COUNT, 3, 2, 2)
    return logits, torch.randint(CLASSES, (COUNT,), generator=generator), images


def strategy_of(coordinator):
    plan = SamplingPlan()
    if coordinator is None:
        return OneProcess(plan, device="cpu")
    strategy = DataParallel(plan, coordinator, process_group_backend="gloo")
    strategy.parallel_devices = [torch.device("cpu")]
    return strategy


def exchange(coordinator, collection):
    """Returns plain values of the combined outputs, or the message of an error."""
    try:
        found = collection.exchange(strategy_of(coordinator))
    except CollectionError as error:
        return str(error)
    if found is None:
        return None
    if found.pairs is not None:
        return sorted(found.pairs.true.tolist()), found.pairs.total
    worst = [(int(sample.image[0, 0, 0]), sample.true, sample.predicted) for sample in found.worst]
    return found.counts.matrix.tolist(), found.counts.micro_average.true_positives.tolist(), worst


def share_of(coordinator, ends):
    """Returns a collection, and the numbers of the samples from the previous rank's end to this rank's end."""
    launch = coordinator.launch
    begin = ends[launch.rank - 1] if launch.rank else 0
    return Collection(launch.world_size, launch.rank), torch.arange(begin, ends[launch.rank])


def classify(coordinator, ends):
    collection, samples = share_of(coordinator, ends)
    logits, targets, images = data()
    for part in samples.split(7):
        if len(part):
            collection.add({"logits": logits[part], "targets": targets[part]}, (images[part], targets[part]))
    return exchange(coordinator, collection)


def regress(coordinator, ends):
    collection, samples = share_of(coordinator, ends)
    collection.add({"predictions": samples + 1.0, "targets": samples.float()}, None)
    return exchange(coordinator, collection)


def differ(coordinator, kinds):
    collection, _ = share_of(coordinator, (0, 0))
    outputs = {
        "three": {"logits": torch.eye(3), "targets": torch.arange(3)},
        "two": {"logits": torch.eye(2), "targets": torch.arange(2)},
        "pairs": {"predictions": torch.ones(3), "targets": torch.ones(3)},
        "error": {"logits": torch.eye(3), "targets": torch.full((3,), 7)},
        "other": {"loss": 1.0},
    }
    for name in kinds[coordinator.launch.rank]:
        collection.add(outputs[name], None)
    return exchange(coordinator, collection)


def expected_classification():
    logits, targets, _ = data()
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for true, predicted in zip(targets.tolist(), logits.argmax(1).tolist(), strict=True):
        matrix[true, predicted] += 1
    own = logits.softmax(1).gather(1, targets[:, None])
    positives = [int((own >= threshold).sum()) for threshold in torch.linspace(0, 1, 100)]
    worst = F.cross_entropy(logits, targets, reduction="none").argsort(descending=True)[:16].tolist()
    return matrix.tolist(), positives, [(i, int(targets[i]), int(logits[i].argmax())) for i in worst]


@pytest.mark.parametrize("ends", [(27, 40), (0, 40), (40, 40)])
def test_a_classification_equals_a_direct_computation(on_ranks, ends):
    for found in on_ranks(classify, len(ends), ends):
        assert found == expected_classification()


@pytest.mark.parametrize("ends", [(27, 40), (0, 40)])
def test_a_regression_contains_the_values_of_all_ranks(on_ranks, ends):
    for values, total in on_ranks(regress, 2, ends):
        assert values == list(map(float, range(40))) and total == 40


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((["three"], ["two"]), "2 classes and 3 classes on different ranks"),
        ((["pairs"], ["two"]), "2 classes and predictions on different ranks"),
        ((["three"], ["error", "three"]), "rank 1 could not collect"),
        ((["three", "two"], []), "logits for 3 and 2 classes"),
        ((["three", "pairs"], ["three"]), "logits for some batches and predictions for others"),
        ((["other"], []), None),
    ],
)
def test_outputs_that_cannot_be_combined_are_reported_on_all_ranks_and_others_are_no_outputs(on_ranks, kinds, message):
    first, second = on_ranks(differ, 2, kinds)
    if message is None:
        assert first is second is None
    else:
        assert message in first and (message in second or "see logs/rank-000.log" in second)


def test_a_single_process_without_a_group_collects_everything():
    collection = Collection(1, 0)
    logits, targets, images = data()
    for part in torch.arange(COUNT).split(7):
        collection.add({"logits": logits[part], "targets": targets[part]}, {"x": images[part]})
    assert exchange(None, collection) == expected_classification()
