from itertools import product

import pytest
import torch

from data_modules.augmentation import ImageTransform, crop_at_random, mirror_at_random
from data_modules.in_memory import random_keys
from data_modules.parts import MIN_THREAD_ROWS
from running import restore_process_state


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 5, 9)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_a_transformed_batch_equals_the_per_image_formula_bit_for_bit(shape, dtype):
    mean, std = [125.3, 123.0, 113.9][: shape[0]], [63.0, 62.1, 66.7][: shape[0]]
    for padding, flip, count in product((0, 3), (False, True), (50, 300)):
        case = f"padding={padding} flip={flip} count={count}"
        images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8).to(dtype)
        keys, original = random_keys(range(count)), images.clone()
        expected = transformed_one_by_one(images, keys, mean, std, padding, flip)
        transform = ImageTransform(mean, std, padding=padding, flip=flip)
        batch = transform(images, keys)
        assert torch.equal(batch, expected) and torch.equal(images, original) and transform.by_image, case
        assert batch.is_contiguous() and batch.dtype is torch.float32, case


def transformed_one_by_one(images, keys, mean, std, padding, flip):
    height, width = images.shape[-2:]
    transformed = []
    for image, key in zip(images, keys.tolist(), strict=True):
        padded = torch.nn.functional.pad(image, (padding,) * 4)
        top, left = (((key >> bits) & 0xFFFFFF) % (2 * padding + 1) for bits in (8, 36))
        crop = padded[:, top : top + height, left : left + width]
        mirrored = crop.flip(-1) if flip and key & 1 else crop
        transformed.append((mirrored.float() - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1))
    return torch.stack(transformed)


def test_half_of_the_images_are_mirrored_and_all_crops_are_equally_frequent():
    torch.manual_seed(0)
    images = torch.arange(4.0).expand(1000, 1, 1, 4)
    mirrored = (ImageTransform((0.0,), (1.0,), flip=True)(images, random_keys(range(1000)))[:, 0, 0, 0] == 3).sum()
    assert 400 < mirrored < 600
    image = torch.zeros(1, 1, 5, 5)
    image[..., 2, 2] = 1
    cropped = crop_at_random(image.expand(9000, 1, 5, 5), 1, random_keys(range(9000)))
    assert cropped.sum(0)[0, 1:4, 1:4].sub(1000).abs().max() < 5 * 1000**0.5


@pytest.mark.parametrize("padding", [1, 2, 4])
def test_the_key_determines_the_crop_window(padding):
    choices = range(2 * padding + 1)
    keys = [top << 8 | left << 36 for top in choices for left in choices] + [0, 1, -1, 2**63 - 1, -(2**63)]
    image = torch.arange(1, 2 * 3 * 5 + 1).reshape(2, 3, 5)
    padded = torch.nn.functional.pad(image, (padding,) * 4)
    cropped = crop_at_random(image.expand(len(keys), 2, 3, 5), padding, torch.tensor(keys))
    for key, crop in zip(keys, cropped, strict=True):
        top, left = (((key >> bits) & 0xFFFFFF) % len(choices) for bits in (8, 36))
        assert torch.equal(crop, padded[:, top : top + 3, left : left + 5])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 8, 16])
def test_odd_keys_flip_an_image_and_even_keys_leave_it_unchanged(dtype, width):
    images = torch.randint(0, 256, (6, 2, 3, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    original = images.clone()
    mirrored = mirror_at_random(images, torch.tensor([0, 1, 2, -1, -2, 2**63 - 1]))
    assert torch.equal(mirrored[[1, 3, 5]], images[[1, 3, 5]].flip(-1))
    assert torch.equal(mirrored[::2], images[::2])
    assert mirrored.dtype is dtype and torch.equal(images, original)


def test_neither_the_number_of_threads_nor_the_memory_layout_changes_the_result():
    transform = ImageTransform((120.0,), (60.0,), padding=1, flip=True)
    images = torch.randint(0, 256, (3 * MIN_THREAD_ROWS, 1, 4, 4), dtype=torch.uint8)
    keys = random_keys(range(len(images)))
    with restore_process_state():
        torch.set_num_threads(1)
        expected = transform(images, keys)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(transform(images, keys), expected)
    transform = ImageTransform((120.0,) * 3, (60.0,) * 3, padding=1, flip=True)
    images = torch.randint(0, 256, (9, 8, 8, 3), dtype=torch.uint8).permute(0, 3, 1, 2)  # not contiguous
    assert torch.equal(transform(images, keys[:9]), transform(images.contiguous(), keys[:9]))
    empty = transform(images[:0], keys[:0])
    assert empty.shape == (0, 3, 8, 8) and empty.dtype is torch.float32
