import pytest
import torch

from data_modules.synthetic_images import POOL_SIZE, NoiseImages, SyntheticImages


@pytest.mark.parametrize("count", [1, POOL_SIZE - 1, POOL_SIZE, POOL_SIZE + 1])
def test_samples_repeat_after_the_end_of_the_pool_and_negative_indices_count_from_the_end(count):
    data, pool = NoiseImages(count, (1, 2, 2), classes=4, generator=torch.Generator()), min(count, POOL_SIZE)
    assert len(data) == count and len(data.images) == pool
    indices = [0, count - 1, count // 2, -1, -count]
    images, labels = data.__getitems__(indices)
    for index, image, label in zip(indices, images, labels, strict=True):
        assert torch.equal(image, data.images[index % count % pool]) and label == data.labels[index % count % pool]
        assert torch.equal(image, data[index][0]) and label == data[index][1]


def test_an_index_outside_the_data_is_refused_and_no_index_gives_an_empty_batch():
    data = NoiseImages(5, (3, 2, 2), classes=4, generator=torch.Generator())
    for index in (5, -6):
        with pytest.raises(IndexError):
            data[index]
    images, labels = data.__getitems__([])
    assert images.shape == (0, 3, 2, 2) and labels.shape == (0,)


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
