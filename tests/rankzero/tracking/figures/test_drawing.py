import io

import pytest
import torch
from PIL import Image

from rankzero.tracking.figures import charts, drawing
from rankzero.tracking.figures.canvas import distinct_labels, png
from rankzero.tracking.figures.class_counts import ClassCounts
from rankzero.tracking.figures.collection import Validation
from rankzero.tracking.figures.value_pairs import Pairs
from rankzero.tracking.figures.worst_samples import WorstSample

HOSTILE = ["$\\frac{", "a" * 200, "\u732b \U0001f408", "<b>&amp;</b>"]


class Recorder:
    """Stores the sizes of figures in place of a `Publisher`."""

    def __init__(self):
        self.sizes, self.curves = {}, []

    def publish(self, name, content):
        self.sizes[name] = Image.open(io.BytesIO(content)).size

    def publish_curves(self, names, curves):
        self.curves = names


def counts_of(classes, samples=300):
    torch.manual_seed(0)
    counts = ClassCounts(classes)
    counts.add(torch.randn(samples, classes), torch.randint(classes, (samples,)))
    return counts


@pytest.mark.parametrize("classes", [4, 300])
def test_all_figures_of_a_classification_are_drawn(classes):
    recorder = Recorder()
    worst = tuple(WorstSample(2.0, 1, 0, torch.rand(1, 5, 9)) for _ in range(3))
    names = (HOSTILE * classes)[:classes]
    drawing.draw_validation(recorder, Validation(counts_of(classes), worst), names)
    assert set(recorder.sizes) == {"most_wrong", "confusion_matrix", "accuracy_by_class", "precision_recall"}
    assert all(200 < side < 2500 for size in recorder.sizes.values() for side in size)
    assert recorder.curves == ([*names, "micro average"] if classes <= 10 else ["micro average"])


def test_the_most_confused_of_many_classes_are_shown():
    matrix = torch.zeros(100, 100, dtype=torch.int64).fill_diagonal_(50)
    matrix[7, 93], matrix[93, 8] = 20, 10
    shown = charts.most_confused(matrix).tolist()
    assert len(shown) == 30 and {7, 8, 93} < set(shown) and shown == sorted(shown)
    assert charts.most_confused(matrix[:30, :30]).tolist() == list(range(30))


def test_a_perfect_classifier_has_an_average_precision_of_one():
    counts = ClassCounts(3)
    counts.add(100 * torch.eye(3), torch.arange(3))
    assert charts.average_precision(counts.curves[0]) == pytest.approx(1.0)


@pytest.mark.parametrize("values", [[1.0, 2.0, float("nan")], [float("inf")], [3.0, 3.0], []])
def test_any_values_of_a_regression_are_drawn(values):
    true = torch.tensor(values, dtype=torch.float64)
    assert png(charts.draw_pairs(Pairs(true, true, 9))).startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 16])
def test_images_are_drawn_with_and_without_labels(count):
    images = torch.rand(count, 3, 6, 4)
    for labels in ([], ["a\nb"] * count):
        assert png(drawing.draw_grid("title", images, labels)).startswith(b"\x89PNG")
    recorder = Recorder()
    drawing.draw_inputs(recorder, torch.zeros(2, 1, 3, 3, dtype=torch.uint8), [0, -5], ["cat"])  # an unknown class
    assert set(recorder.sizes) == {"training_inputs"}


def test_each_image_is_scaled_to_one():
    image = drawing.scaled(torch.tensor([[[-3.0, 0.0], [1.0, 5.0]]]))
    assert image.flatten().tolist() == [0.0, 0.375, 0.5, 1.0]
    assert drawing.scaled(torch.full((1, 2, 2), 7.0)).sum() == 0


def test_equal_labels_are_distinguished_by_the_number_of_the_class():
    names = [f"a very long name {number} with a common end" for number in range(12)]
    assert distinct_labels(["cat", "dog"], [1, 0], 10) == ["dog", "cat"]
    labels = distinct_labels(names, [3, 11], 12)
    assert [label.split()[0] for label in labels] == ["3", "11"] and all(len(label) <= 12 for label in labels)
