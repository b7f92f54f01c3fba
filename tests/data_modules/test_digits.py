import pytest
import torch
from sklearn.datasets import load_digits

from data_modules.digits import MEAN, SIZES, STD, Digits
from data_modules.synthetic_images import POOL_SIZE, NoiseImages, SyntheticImages
from data_modules.toy import Toy


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


@pytest.mark.parametrize("count", [1, POOL_SIZE - 1, POOL_SIZE, POOL_SIZE + 1])
def test_samples_repeat_after_the_end_of_the_pool_and_negative_indices_count_from_the_end(count):
    data, pool = NoiseImages(count, (1, 2, 2), classes=4, generator=torch.Generator()), min(count, POOL_SIZE)
    assert len(data) == count and len(data.images) == pool
    indices = [0, count - 1, count // 2, -1, -count]
    images, labels = data.__getitems__(indices)
    for index, image, label in zip(indices, images, labels, strict=True):
        assert torch.equal(image, data.images[index % count % pool]) and label == data.labels[index % count % pool]
        assert torch.equal(image, data[index][0]) and label == data[index][1]


def test_a_single_class_and_pixel_are_allowed_and_memory_does_not_grow_with_the_count():
    module = SyntheticImages(count=3, image_size=1, in_channels=1, num_classes=1)
    images, labels = module.load()["train"].__getitems__(range(3))
    assert module.in_features == 1 and images.shape == (3, 1, 1, 1) and labels.tolist() == [0, 0, 0]
    dataset = SyntheticImages(count=10**9, image_size=8).load()["train"]
    assert len(dataset) == 10**9 and dataset.images.numel() < 10**6
    assert torch.equal(dataset.__getitems__([10**9 - 1])[0][0], dataset[10**9 - 1][0])
    pools = [data.images for seed in range(3) for data in SyntheticImages(count=80, data_seed=seed).load().values()]
    images = [tuple(image.flatten().tolist()) for pool in pools for image in pool]
    assert len(set(images)) == len(images)  # also of splits of neighboring seeds


def rows(dataset):
    return {tuple(pair.flatten().tolist()) for pair in dataset.inputs}


def test_the_data_are_uniform_random_numbers_with_the_tutorials_shape_and_splits_do_not_overlap():
    splits = Toy().load()
    assert len(splits["train"]) == 2048 and splits["train"].inputs.shape == (2048, 20)
    assert not rows(splits["train"]) & rows(splits["val"]) and not rows(splits["val"]) & rows(splits["test"])
    train, generator = Toy(count=40, data_seed=0).load()["train"], torch.Generator().manual_seed(0)
    assert torch.equal(train.inputs, torch.rand(40, 20, generator=generator))
    assert torch.equal(train.targets, torch.rand(40, 1, generator=generator))
