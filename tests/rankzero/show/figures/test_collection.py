"""Collections of several ranks, compared with a direct computation."""

import pytest
import torch
from pretended_cuda import pretended_cuda
from torch.nn import functional as F
from torchmetrics.classification import (
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassPrecisionRecallCurve,
)

from rankzero.sampling.plan import SamplingPlan
from rankzero.show.figures import collection
from rankzero.show.figures.class_counts import IGNORED_TARGET, THRESHOLDS, ClassCounts
from rankzero.show.figures.collection import Collection, CollectionError, PairSelection, WorstSamples
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
        return sorted(zip(found.pairs.true.tolist(), found.pairs.predicted.tolist(), strict=True)), found.pairs.total
    assert torch.equal(found.counts.correct, found.counts.matrix.diagonal())
    assert torch.equal(found.counts.samples, found.counts.matrix.sum(1))
    worst = [(int(one.image[0, 0, 0]), one.true, one.predicted, round(one.loss, 4)) for one in found.worst]
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
    rank, results = coordinator.world.rank, []
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
    losses = F.cross_entropy(LOGITS, TARGETS, reduction="none")
    worst = losses.argsort(descending=True)[:16].tolist()
    labels = [(i, int(TARGETS[i]), int(LOGITS[i].argmax()), round(float(losses[i]), 4)) for i in worst]
    return matrix.tolist(), positives, labels


SHARES = [((0, end), (end, COUNT)) for end in (27, 0, 40)]
"""First sample and end of the samples of both ranks; a rank may have none."""


def test_collections_of_two_ranks_equal_a_direct_computation(on_ranks):
    assert on_ranks(collect, 2, add_samples, SHARES) == [[expected_classification()] * 3] * 2
    values = [(float(number), number + 1.0) for number in range(COUNT)], COUNT
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


@pytest.mark.parametrize("classes", [2, 10, 13])
def test_counts_and_curves_equal_those_of_torchmetrics(classes):
    torch.manual_seed(0)
    logits, targets, counts = 3 * torch.randn(58, classes), torch.randint(classes, (58,)), ClassCounts(classes)
    for part in torch.arange(58).split((50, 7, 1)):
        counts.add(logits[part], targets[part])
    assert torch.equal(counts.matrix, MulticlassConfusionMatrix(classes)(logits, targets))
    accuracy = counts.correct / counts.samples
    torch.testing.assert_close(accuracy, MulticlassAccuracy(classes, average="none")(logits, targets))
    assert counts.samples.sum() == len(targets)
    assert len(counts.curves) == (classes if classes <= 10 else 0)
    metric = MulticlassPrecisionRecallCurve(classes, thresholds=THRESHOLDS)
    metric.update(logits.softmax(1), targets)
    for number, curve in enumerate(counts.curves):
        expected = metric.confmat[:, number].flatten(1).flip(1).T[[0, 2, 1, 3]]
        found = curve.true_positives, curve.false_positives, curve.false_negatives, curve.true_negatives
        assert all(map(torch.equal, found, expected))
    metric = BinaryPrecisionRecallCurve(thresholds=THRESHOLDS)
    metric.update(logits.softmax(1).flatten(), torch.nn.functional.one_hot(targets, classes).flatten())
    assert torch.equal(counts.micro_average.true_positives, metric.confmat[:, 1, 1])
    assert torch.equal(counts.micro_average.false_positives, metric.confmat[:, 0, 1])


def test_ignored_targets_are_not_counted_and_probabilities_that_are_not_numbers_are():
    counts = ClassCounts(3)
    counts.add(torch.eye(3), torch.tensor([0, IGNORED_TARGET, 1]))
    counts.add(torch.eye(3), torch.full((3,), IGNORED_TARGET))
    assert counts.samples.tolist() == [1, 1, 0] and counts.correct.tolist() == [1, 0, 0]
    counts.add(torch.full((2, 3), torch.nan), torch.tensor([0, 1]))
    assert counts.samples.tolist() == [2, 2, 0]


def gather(worst):
    return worst.gather(OneProcess(SamplingPlan(), device="cpu"), 0, worst.shape)


def test_a_loss_that_is_not_a_number_is_the_largest_and_ignored_samples_are_not_kept():
    worst, logits = WorstSamples(), LOGITS.clone()
    logits[2] = torch.nan
    worst.add(logits[:4], torch.tensor([0, IGNORED_TARGET, 1, 2]), IMAGES[:4])
    kept = [int(sample.image[0, 0, 0]) for sample in gather(worst)]
    assert kept[0] == 2 and sorted(kept) == [0, 2, 3]


def test_large_images_are_downscaled_on_a_cpu_only_those_with_larger_losses_than_the_kept_ones(monkeypatch):
    images = torch.rand(2, 3, 480, 320)
    assert collection.stored_shape(images) == (3, 96, 64) == tuple(collection.downscaled(images).shape[1:])
    torch.testing.assert_close(collection.downscaled(images).mean(), images.mean())
    assert tuple(collection.downscaled(torch.zeros(1, 1, 5000, 2, dtype=torch.uint8)).shape) == (1, 1, 96, 1)
    counts, downscale = [], collection.downscaled
    monkeypatch.setattr(collection, "downscaled", lambda images: counts.append(len(images)) or downscale(images))
    worst = WorstSamples()
    for logits in (-LOGITS, LOGITS, torch.cat([-1000 * LOGITS[:1], LOGITS[1:]])):
        worst.add(logits, LOGITS.argmax(1), IMAGES)
    assert counts == [collection.MAX_SAMPLES, 1]


@pytest.mark.parametrize("second", [None, torch.zeros(COUNT, 1, 4, 4)])
def test_images_of_different_shapes_are_not_kept(second):
    worst = WorstSamples()
    for added in (IMAGES, second, IMAGES):
        worst.add(LOGITS, TARGETS, added)
    assert worst.shape == (0, 0, 0) and not gather(worst)


def test_many_pairs_are_selected_evenly_without_the_global_generator_and_each_rank_keeps_a_part():
    state, selection = torch.get_rng_state(), PairSelection(1, 0)
    for part in torch.arange(100_000.0).split(7_001):
        selection.add(part, part)
    pairs = selection.gather(OneProcess(SamplingPlan(), device="cpu"))
    assert len(pairs.true) == collection.MAX_PAIRS == len(set(pairs.true.tolist())) and pairs.total == 100_000
    assert abs(float(pairs.true.mean()) - 50_000) < 3_000
    assert torch.equal(torch.get_rng_state(), state)
    assert PairSelection(8, 3).limit == 250 and PairSelection(3, 0).limit == 667


SCORES, LABELS = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    "returned",
    [
        *(None, [SCORES, LABELS], {"loss": torch.tensor(1.0)}, {"logits": SCORES}),
        *({"logits": SCORES, "targets": targets} for targets in (SCORES, LABELS[:, None], LABELS[:2], LABELS > 1)),
        {"logits": torch.randn(4, 3, 8, 8), "targets": torch.zeros(4, 8, 8, dtype=torch.long)},
        {"predictions": SCORES, "targets": SCORES[:, 0]},
    ],
)
def test_other_outputs_are_ignored(returned):
    assert collection.read_outputs(returned) is None


def test_images_are_found_in_nested_batches_and_classes_by_their_length_and_other_tensors_are_no_images():
    images = torch.rand(4, 3, 5, 5)
    for batch in (images, (images, LABELS), {"meta": "a", "data": [images]}):
        assert torch.equal(collection.find_images(batch), images)
    assert torch.equal(collection.find_classes({"x": torch.rand(4), "y": LABELS}, 4), LABELS)
    assert collection.find_classes((torch.rand(4, 2), torch.rand(4)), 4) is None
    for shape in ((4, 3), (4, 2, 5, 5), (4, 3, 5, 5, 5), (0, 3, 5, 5)):
        assert collection.find_images((torch.rand(shape), LABELS)) is None
    assert collection.find_images(torch.zeros(4, 3, 5, 5, dtype=torch.int64)) is None
    assert collection.find_images(torch.rand(4, 1, 5, 5), 8) is None  # the outputs have another number


def test_outputs_are_counted_on_their_gpu():
    with pretended_cuda() as device:
        collection = Collection(1, 0)
        targets = torch.zeros(4, dtype=torch.int64, device="cuda")
        collection.add({"logits": torch.zeros(4, 3, device="cuda"), "targets": targets}, None)
        assert collection.error is None and device.holds(collection._counts._thresholds)
