import pytest
import torch
from torchmetrics.classification import (
    BinaryPrecisionRecallCurve,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassPrecisionRecallCurve,
)

from rankzero.tracking.figures import class_counts
from rankzero.tracking.figures.class_counts import IGNORED_TARGET, THRESHOLDS, ClassCounts


def batches(classes, sizes=(50, 7, 1)):
    torch.manual_seed(0)
    return [(3 * torch.randn(size, classes), torch.randint(classes, (size,))) for size in sizes]


def counted(classes):
    counts = ClassCounts(classes)
    for logits, targets in batches(classes):
        counts.add(logits, targets)
    return counts


@pytest.mark.parametrize("classes", [2, 10, 13])
def test_counts_and_curves_equal_those_of_torchmetrics(classes):
    logits, targets = (torch.cat(parts) for parts in zip(*batches(classes), strict=True))
    counts = counted(classes)
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


@pytest.mark.parametrize("target", [-1, 3])
def test_targets_that_are_no_classes_raise_an_error(target):
    with pytest.raises(ValueError, match="for 3 classes"):
        ClassCounts(3).add(torch.eye(3), torch.tensor([0, 1, target]))


def test_packed_counts_can_be_summed_and_too_many_classes_have_no_matrix(monkeypatch):
    first, second = counted(4), counted(4)
    total = first.packed() + second.packed()
    first.unpack(total)
    assert torch.equal(first.matrix, 2 * second.matrix)
    assert torch.equal(first.micro_average.true_positives, 2 * second.micro_average.true_positives)
    monkeypatch.setattr(class_counts, "MAX_MATRIX_CLASSES", 12)
    assert not counted(13).matrix.numel() and counted(13).samples.sum() == 58
