import pytest
import torch

from data_modules.synthetic_images import POOL_SIZE, NoiseImages, SyntheticImages


def set_up(module):
    module.setup("fit")
    return module


def test_memory_does_not_grow_with_the_count():
    dataset = set_up(SyntheticImages(count=10**9, image_size=8)).splits["train"]
    assert len(dataset) == 10**9 and dataset.images.numel() < 10**6
    assert torch.equal(dataset.__getitems__([10**9 - 1])[0][0], dataset[10**9 - 1][0])


@pytest.mark.parametrize(
    ("count", "pool"), [(1, 1), (POOL_SIZE - 1, POOL_SIZE - 1), (POOL_SIZE, POOL_SIZE), (POOL_SIZE + 1, POOL_SIZE)]
)
def test_samples_repeat_after_the_end_of_the_pool(count, pool):
    data = NoiseImages(count, (1, 2, 2), classes=4, generator=torch.Generator())
    assert len(data) == count and len(data.images) == pool
    indices = [0, count - 1, count // 2]
    images, labels = data.__getitems__(indices)
    for index, image, label in zip(indices, images, labels, strict=True):
        assert torch.equal(image, data.images[index % pool]) and label == data.labels[index % pool]
        assert torch.equal(image, data[index][0]) and label == data[index][1]


@pytest.mark.parametrize("count", [1, POOL_SIZE, POOL_SIZE + 5])
def test_negative_indices_count_from_the_end(count):
    data = NoiseImages(count, (1, 2, 2), classes=4, generator=torch.Generator())
    images, labels = data.__getitems__([-1, -count])
    for position, index in enumerate((count - 1, 0)):
        for image, label in ((images[position], labels[position]), data[(-1, -count)[position]]):
            assert torch.equal(image, data[index][0]) and label == data[index][1]


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_outside_the_data_is_refused(index):
    with pytest.raises(IndexError):
        NoiseImages(5, (1, 2, 2), classes=4, generator=torch.Generator())[index]


def test_splits_of_neighboring_seeds_share_no_image():
    pools = [data.images for seed in range(3) for data in SyntheticImages(count=80, data_seed=seed).load().values()]
    images = [tuple(image.flatten().tolist()) for pool in pools for image in pool]
    assert len(set(images)) == len(images)


def test_an_empty_list_of_indices_returns_an_empty_batch():
    images, labels = NoiseImages(5, (3, 2, 2), classes=4, generator=torch.Generator()).__getitems__([])
    assert images.shape == (0, 3, 2, 2) and labels.shape == (0,)


def test_images_and_labels_depend_only_on_the_seed_and_the_split():
    first, same_seed, other_seed = (SyntheticImages(count=9, image_size=2, data_seed=seed).load() for seed in (5, 5, 6))
    for split in ("train", "val", "test"):
        assert torch.equal(first[split].images, same_seed[split].images)
        assert torch.equal(first[split].labels, same_seed[split].labels)
        assert not torch.equal(first[split].images, other_seed[split].images)
    assert not torch.equal(first["val"].images, first["test"].images)


@pytest.mark.parametrize(("count", "held_out"), [(1, 1), (7, 1), (8, 1), (16, 2), (4096, 512)])
def test_val_and_test_have_an_eighth_of_the_count_and_at_least_one_sample(count, held_out):
    splits = SyntheticImages(count=count, image_size=1).load()
    assert {split: len(data) for split, data in splits.items()} == {"train": count, "val": held_out, "test": held_out}


def test_a_single_class_and_a_single_pixel_are_allowed():
    module = SyntheticImages(count=3, image_size=1, in_channels=1, num_classes=1)
    images, labels = module.load()["train"].__getitems__(range(3))
    assert module.in_features == 1 and images.shape == (3, 1, 1, 1) and labels.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["count", "image_size", "in_channels", "num_classes"])
@pytest.mark.parametrize("value", [0, -1])
def test_the_error_names_a_size_below_one(name, value):
    with pytest.raises(ValueError, match=f"^--data.{name} is {value}; it must be 1 or more$"):
        SyntheticImages(**{name: value})
