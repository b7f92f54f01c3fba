import pytest
import torch
from sklearn.datasets import load_digits

from data_modules.digits import MEAN, SIZES, STD, Digits


def test_only_augmented_training_digits_are_shifted_by_at_most_one_pixel():
    splits = Digits().load()
    torch.manual_seed(0)
    indices = list(range(20))
    assert not torch.equal(*(splits["train"].__getitems__(indices)[0] for _ in range(2)))
    assert torch.equal(*(splits["val"].__getitems__(indices)[0] for _ in range(2)))
    assert torch.equal(*(Digits(augment=False).load()["train"].__getitems__(indices)[0] for _ in range(2)))
    data = splits["train"]
    images, _ = data.__getitems__([7] * 200)
    levels = (images * STD[0] + MEAN[0]).round().to(torch.uint8)
    padded = torch.nn.functional.pad(data.inputs[7], (1,) * 4)
    windows = {tuple(padded[0, i : i + 8, j : j + 8].flatten().tolist()) for i in range(3) for j in range(3)}
    assert {tuple(image.flatten().tolist()) for image in levels} == windows


def test_the_splits_together_contain_each_scikit_learn_digit_once():
    bunch = load_digits()
    expected = [(*image.flatten().tolist(), label) for image, label in zip(bunch.images, bunch.target, strict=True)]
    splits = Digits(split_seed=3).load()
    found = [
        (*image.flatten().tolist(), label)
        for data in splits.values()
        for image, label in zip(data.inputs, data.targets.tolist(), strict=True)
    ]
    assert sorted(found) == sorted(expected) and SIZES == {"train": 1437, "val": 180, "test": 180}
    assert {name: len(data) for name, data in splits.items()} == SIZES
    images = torch.as_tensor(bunch.images)
    assert (images.mean().item(), images.std().item()) == pytest.approx((*MEAN, *STD), abs=1e-3)
