import io
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from rankzero.show.figures import drawing
from rankzero.show.figures.callback import is_last_validation
from rankzero.show.figures.class_counts import ClassCounts
from rankzero.show.figures.collection import Pairs, Validation, WorstSample, class_names, tags_of
from rankzero.show.figures.drawing import png
from running import train_in_process
from stock import Unsized

HOSTILE = ["$\\frac{", "a" * 200, "\u732b \U0001f408", "<b>&amp;</b>"]


def sizes_of(figures):
    """Returns the sizes of the published figures, by name."""
    return {name: Image.open(io.BytesIO(content)).size for (name, content), _ in figures.publish.call_args_list}


@pytest.mark.parametrize("classes", [4, 300])
def test_all_figures_of_a_classification_are_drawn(classes):
    torch.manual_seed(0)
    figures, counts = Mock(), ClassCounts(classes)
    counts.add(torch.randn(300, classes), torch.randint(classes, (300,)))
    worst = tuple(WorstSample(2.0, 1, 0, torch.rand(1, 5, 9)) for _ in range(3))
    names = (HOSTILE * classes)[:classes]
    drawing.draw_validation(figures, Validation(counts, worst), names)
    sizes = sizes_of(figures)
    assert set(sizes) == {"most_wrong", "confusion_matrix", "accuracy_by_class", "precision_recall"}
    assert all(200 < side < 2500 for size in sizes.values() for side in size)
    assert figures.publish_curves.call_args.args[0] == [*(names if classes <= 10 else []), "micro average"]


def test_the_most_confused_of_many_classes_are_shown():
    matrix = torch.zeros(100, 100, dtype=torch.int64).fill_diagonal_(50)
    matrix[7, 93], matrix[93, 8] = 20, 10
    shown = drawing.most_confused(matrix).tolist()
    assert len(shown) == 30 and {7, 8, 93} < set(shown) and shown == sorted(shown)
    assert drawing.most_confused(matrix[:30, :30]).tolist() == list(range(30))


@pytest.mark.parametrize("values", [[1.0, 2.0, float("nan")], [float("inf")], [3.0, 3.0], []])
def test_any_values_of_a_regression_are_drawn(values):
    true = torch.tensor(values, dtype=torch.float64)
    assert png(drawing.draw_pairs(Pairs(true, true, 9))).startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 16])
def test_images_are_drawn_with_and_without_labels(count):
    images = torch.rand(count, 3, 6, 4)
    for labels in ([], ["a\nb"] * count):
        assert png(drawing.draw_grid("title", images, labels)).startswith(b"\x89PNG")
    figures = Mock()
    drawing.draw_inputs(figures, torch.zeros(2, 1, 3, 3, dtype=torch.uint8), [0, -5], ["cat"])  # an unknown class
    assert set(sizes_of(figures)) == {"training_inputs"}


NAMES = ["cat", "dog", "owl"]


class Named(Dataset):
    def __init__(self, classes=NAMES):
        self.classes = classes

    def __len__(self):
        return 4


def trainer(module_names=None, dataset=None, validation=None):
    def loop(data):
        return SimpleNamespace(_combined_loader=data and SimpleNamespace(flattened=[SimpleNamespace(dataset=data)]))

    training = loop(dataset)
    training.epoch_loop = SimpleNamespace(val_loop=loop(validation))
    return SimpleNamespace(datamodule=SimpleNamespace(class_names=module_names), fit_loop=training)


@pytest.mark.parametrize(
    "dataset", [Named(), Subset(Subset(Named(), [0, 1]), [0]), ConcatDataset([Subset(Named(), [0]), Named()])]
)
def test_names_of_the_data_module_come_first_and_those_of_the_data_set_are_found_behind_other_data_sets(dataset):
    assert class_names(trainer(("a", "b", "c"), Named()), 3) == ["a", "b", "c"]
    assert class_names(trainer(dataset=dataset), 3) == NAMES
    assert class_names(trainer(dataset=Named(None), validation=dataset), 3) == NAMES


def test_without_data_classes_have_numbers_names_are_text_in_one_line_and_tags_are_distinct_without_separators():
    assert class_names(trainer(), 2) == ["0", "1"] and class_names(trainer(), None) == []
    assert class_names(trainer(["a\n\tb", None, 7]), 3) == ["a b", "None", "7"]
    assert tags_of(["a/b", "a_b", "", "é 1", "$x$"]) == ["a_b", "a_b_1", "2", "é 1", "_x_"]


def fit(*callbacks, **settings):
    """Trains, and returns for each validation whether it is known to be the last one."""
    seen = []
    validations = LambdaCallback(on_validation_start=lambda trainer, _: seen.append(is_last_validation(trainer)))
    train_in_process(*callbacks, validations, loops=True, num_sanity_val_steps=0, **settings)
    return seen


def test_a_requested_stop_that_min_epochs_prevents_makes_no_validation_the_last():
    stop_early = LambdaCallback(on_train_epoch_start=lambda trainer, _: setattr(trainer, "should_stop", True))
    assert fit(stop_early, limit_train_batches=2, min_epochs=3, max_epochs=5) == [False] * 3


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"data": "stream", "max_epochs": 3}, 3),
        ({"data": "stream", "max_epochs": 3, "max_steps": 8}, 2),
        ({"data": "stream", "max_epochs": 2, "val_check_interval": 2}, 4),
        ({"data": "stream", "max_steps": 10_000, "max_epochs": 3}, 3),
        ({"max_epochs": 3}, 3),
        ({"max_epochs": 5, "check_val_every_n_epoch": 2}, 2),
        ({"max_epochs": 2, "val_check_interval": 3}, 6),
        ({"max_epochs": 2, "val_check_interval": 4}, 4),
        ({"max_epochs": 3, "val_check_interval": 7, "check_val_every_n_epoch": None}, 4),
        ({"max_steps": 20}, 2),
        ({"max_steps": 25, "val_check_interval": 5}, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 5}, 4),
    ],
)
def test_exactly_the_last_validation_is_known_to_be_the_last_also_without_a_length(settings, count):
    if "data" in settings:  # four batches, no length
        settings = {**settings, "data": DataLoader(Unsized(torch.rand(4, 32))), "limit_train_batches": 1.0}
    assert fit(**{"limit_train_batches": 10, **settings}) == [False] * (count - 1) + [True]
