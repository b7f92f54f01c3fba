from types import SimpleNamespace

import numpy
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from data_modules import CIFAR10, Digits, FashionMNIST
from rankzero.tracking.figures.class_names import class_names, tags_of

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


def test_names_of_the_data_module_come_first():
    assert class_names(trainer(("a", "b", "c"), Named()), 3) == ["a", "b", "c"]
    assert class_names(trainer(numpy.array(NAMES)), 3) == NAMES


@pytest.mark.parametrize(
    "dataset", [Named(), Subset(Subset(Named(), [0, 1]), [0]), ConcatDataset([Subset(Named(), [0]), Named()])]
)
def test_names_of_the_data_set_are_found_behind_other_data_sets(dataset):
    assert class_names(trainer(dataset=dataset), 3) == NAMES
    assert class_names(trainer(dataset=Named(None), validation=dataset), 3) == NAMES


@pytest.mark.parametrize("names", [None, 3, "abc", ["cat", "dog"], Ellipsis])
def test_classes_without_names_have_numbers(names):
    assert class_names(trainer(names, Named(names)), 3) == ["0", "1", "2"]


def test_without_data_classes_have_numbers_and_names_are_one_line_of_valid_text():
    assert class_names(trainer(), 2) == ["0", "1"] and class_names(trainer(), None) == []
    names = class_names(trainer(["a\n\tb", "", "\ud800x", "y" * 5000, None, 7]), 6)
    assert names == ["a b", "?", "?x", "y" * 200, "None", "7"]


def test_tags_are_distinct_and_have_no_separators():
    assert tags_of(["a/b", "a_b", "", "é 1", "$x$"]) == ["a_b", "a_b_1", "2", "é 1", "_x_"]


def test_included_data_modules_have_names():
    for module in (Digits, FashionMNIST, CIFAR10):
        assert len(module.class_names) == module.num_classes == len(set(module.class_names))
