import pytest
import torch

from rankzero.tracking.figures.outputs import CLASSIFICATION, REGRESSION, find_classes, find_images, read_outputs

LOGITS, CLASSES = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])


def test_logits_and_classes_are_a_classification_and_other_predictions_of_equal_shape_a_regression():
    outputs = read_outputs({"logits": LOGITS.bfloat16(), "targets": CLASSES.int(), "loss": 1.0})
    assert outputs.kind == CLASSIFICATION
    assert outputs.predictions.dtype == torch.float32 and torch.equal(outputs.targets, CLASSES)
    assert read_outputs({"predictions": LOGITS, "targets": LOGITS.double()}).kind == REGRESSION


@pytest.mark.parametrize(
    "returned",
    [
        *(None, torch.tensor(1.0), [LOGITS, CLASSES], {}, {"loss": torch.tensor(1.0)}, {"logits": LOGITS}),
        {"logits": LOGITS, "targets": LOGITS},
        {"logits": LOGITS, "targets": CLASSES[:, None]},
        {"logits": LOGITS, "targets": CLASSES[:2]},
        {"logits": LOGITS[:, :1], "targets": CLASSES},
        {"logits": torch.randn(4, 3, 8, 8), "targets": torch.zeros(4, 8, 8, dtype=torch.long)},
        {"logits": LOGITS[:0], "targets": CLASSES[:0]},
        {"logits": LOGITS, "targets": CLASSES > 1},
        {"logits": "text", "targets": "text"},
        {"predictions": LOGITS, "targets": LOGITS[:, 0]},
        {"predictions": CLASSES, "targets": CLASSES},
    ],
)
def test_other_outputs_are_ignored(returned):
    assert read_outputs(returned) is None


def test_images_are_found_in_nested_batches_and_classes_by_their_length():
    images = torch.rand(4, 3, 5, 5)
    for batch in (images, (images, CLASSES), {"meta": "a", "data": [images]}):
        assert torch.equal(find_images(batch), images)
    assert torch.equal(find_classes({"x": torch.rand(4), "y": CLASSES}, 4), CLASSES)
    assert find_classes((torch.rand(4, 2), torch.rand(4)), 4) is None


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 5, 5), (4, 3, 5, 5, 5), (0, 3, 5, 5)])
def test_other_tensors_are_no_images(shape):
    assert find_images((torch.rand(shape), CLASSES)) is None
    assert find_images(torch.zeros(4, 3, 5, 5, dtype=torch.int64)) is None
    assert find_images(torch.rand(4, 1, 5, 5), 8) is None  # the outputs have another number
