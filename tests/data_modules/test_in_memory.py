import multiprocessing
import threading
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from data_modules import parts
from data_modules.augmentation import ImageTransform, crop_at_random
from data_modules.digits import Digits
from data_modules.in_memory import InMemory, OnDevice, random_keys, split_indices
from data_modules.parts import MAX_THREADS, in_row_blocks
from data_modules.parts import MIN_THREAD_ROWS as ROWS
from data_modules.synthetic_images import SyntheticImages
from data_modules.toy import Toy
from rankzero.sampling.batch_sampler import Position
from rankzero.sampling.permutation import Indices
from rankzero.sampling.plan import SamplingPlan
from running import restore_process_state


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 1000))
def test_splits_never_overlap_and_leave_nothing_out(sizes, seed):
    parts = [part.tolist() for part in split_indices(sizes, seed)]
    assert [len(part) for part in parts] == sizes
    assert sorted(i for part in parts for i in part) == list(range(sum(sizes)))
    assert parts == [part.tolist() for part in split_indices(sizes, seed)]


MODULES = [Toy, Digits, lambda: SyntheticImages(count=300, image_size=12, in_channels=2, num_classes=5)]


def stored(data):
    return (data.inputs, data.targets) if hasattr(data, "inputs") else (data.images, data.labels)


TINY = partial(SyntheticImages, count=9, image_size=2)


@pytest.mark.parametrize(("make_module", "seed"), [(Toy, "data_seed"), (Digits, "split_seed"), (TINY, "data_seed")])
def test_data_depend_only_on_the_seed_and_the_split(make_module, seed):
    first, same_seed, other_seed = (make_module(**{seed: number}).load() for number in (5, 5, 6))
    for split in ("train", "val", "test"):
        for values, same_values in zip(stored(first[split]), stored(same_seed[split]), strict=True):
            assert torch.equal(values, same_values)
        assert not torch.equal(stored(first[split])[0], stored(other_seed[split])[0])
    assert not torch.equal(stored(first["val"])[0], stored(first["test"])[0])


@pytest.mark.parametrize("make_module", MODULES)
def test_the_attributes_of_a_module_match_the_shape_of_its_data(make_module):
    module = make_module()
    module.setup("fit")
    for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
        inputs, targets = next(iter(loader))
        assert inputs.dtype is torch.float32 and inputs[0].numel() == module.in_features
        if hasattr(module, "num_classes"):
            assert inputs.shape[1:] == (module.in_channels, module.image_size, module.image_size)
            assert targets.dtype is torch.int64 and 0 <= targets.min() <= targets.max() < module.num_classes
        else:
            assert targets.shape[1:] == (module.out_features,)


@pytest.mark.parametrize("make_module", MODULES)
def test_a_batch_shares_no_memory_with_later_batches_or_the_data(make_module):
    data = make_module().load()["train"]
    inputs, labels = data.__getitems__(range(8))
    original, all_stored = inputs.clone(), stored(data)[0].clone()
    data.__getitems__(range(8, 16))
    assert torch.equal(inputs, original)
    inputs.zero_(), labels.zero_()
    assert torch.equal(stored(data)[0], all_stored)


def test_an_augmented_image_depends_on_its_key_and_not_on_its_batch():
    class Keyed(list):
        random_keys = property(lambda self: np.array(self, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))

    data = Digits().load()["train"]
    first, second = data.__getitems__(Keyed([1, 2, 3]))[0], data.__getitems__(Keyed([3, 9]))[0]
    assert torch.equal(first[2], second[0])


@pytest.mark.parametrize(("count", "held_out"), [(1, 1), (7, 1), (8, 1), (16, 2), (2048, 256)])
@pytest.mark.parametrize("make_module", [Toy, lambda **settings: SyntheticImages(image_size=1, **settings)])
def test_val_and_test_have_an_eighth_of_the_count_and_at_least_one_sample(make_module, count, held_out):
    splits = make_module(count=count).load()
    assert {split: len(data) for split, data in splits.items()} == {"train": count, "val": held_out, "test": held_out}


@pytest.mark.parametrize(
    ("make_module", "name", "value"),
    [
        *((make, name, 0) for make in (Toy, SyntheticImages) for name in ("count", "batch_size")),
        (Toy, "count", -1),
        *((SyntheticImages, name, value) for name in ("image_size", "in_channels", "num_classes") for value in (0, -1)),
    ],
)
def test_the_error_names_a_size_below_one(make_module, name, value):
    with pytest.raises(ValueError, match=f"^--data.{name} is {value}; it must be 1 or more$"):
        make_module(**{name: value})
    with pytest.raises(ValueError, match="or more"):
        Digits(num_workers=-1)


def planned_loader(data, **settings):
    """Returns the loader of a run, in the data set's order."""
    return SamplingPlan(batch_size=2).wrap(DataLoader(data, batch_size=2, **settings), training=True)


def test_several_small_batches_are_read_at_once_as_independent_tensors():
    reads = []
    data = InMemory(torch.arange(40.0).view(20, 2), torch.arange(20))
    read = InMemory.__getitems__
    data.__class__ = type("Counting", (InMemory,), {"reads_ahead": True})
    data.__class__.__getitems__ = lambda self, indices: reads.append(len(indices)) or read(self, indices)
    batches = list(planned_loader(data, collate_fn=lambda batch: [*batch, "collated"]))
    assert len(reads) == 2 and len(batches) == 10
    assert torch.equal(torch.cat([inputs for inputs, _, _ in batches]), data.inputs)
    versions = [inputs._version for inputs, _, _ in batches]
    batches[3][0].mul_(torch.nn.Parameter(torch.ones(2)))
    assert [inputs._version for inputs, _, _ in batches] == [version + (k == 3) for k, version in enumerate(versions)]
    assert torch.equal(data.inputs, torch.arange(40.0).view(20, 2)) and batches[0][2] == "collated"


class Mixing(InMemory):
    def __getitems__(self, indices):
        inputs, targets = super().__getitems__(indices)
        return inputs.flip(0), targets


def test_a_data_set_that_mixes_samples_is_read_batch_by_batch():
    data = Mixing(torch.arange(8.0).view(8, 1), torch.arange(8))
    found = torch.cat([inputs for inputs, _ in planned_loader(data, collate_fn=tuple)]).flatten()
    assert found.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


def test_a_gathered_batch_equals_the_stacked_single_samples_and_a_tensor_dataset_what_torch_collates():
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.float32):
        data = InMemory(torch.arange(30).view(10, 3).to(dtype), torch.arange(10))
        inputs, targets = next(iter(DataLoader(data, batch_size=4, collate_fn=tuple)))
        assert torch.equal(inputs, torch.stack([data[i][0] for i in range(4)])) and targets.tolist() == [0, 1, 2, 3]
        assert torch.equal(data.__getitems__([4, 0])[0], data.inputs[[4, 0]])
    dataset = TensorDataset(torch.rand(9, 3), torch.arange(9), torch.rand(9, 2, 2).double())
    for data in (dataset, Subset(dataset, [5, -1, 0, 7, -9]), Subset(Subset(dataset, [8, 2, 4, 6]), [3, 0, 1])):
        for found, expected in zip(planned_loader(data), DataLoader(data, batch_size=2), strict=True):
            assert type(found) is type(expected)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def gpu(monkeypatch):
    """A device whose memory is the host's, with 8,000 free bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8000, 80_000))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    return torch.device("cpu")


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("shape", [(1, 4, 4), (2, 3, 5)])
@pytest.mark.parametrize("settings", [None, {}, {"padding": 1}, {"flip": True}, {"padding": 2, "flip": True}], ids=str)
def test_batches_from_a_gpu_equal_those_from_the_host_bit_for_bit(gpu, settings, shape, start):
    images = torch.randint(0, 256, (20, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    transform = ImageTransform([120.0] * shape[0], [63.0] * shape[0], **settings) if settings is not None else None
    data = InMemory(images, torch.arange(20), transform)

    def read(on_gpu):
        plan = SamplingPlan(seed=4)
        plan.start_positions = [Position(2, start, 3 * start)]
        loader = plan.wrap(DataLoader(data, 3, shuffle=True, collate_fn=tuple, pin_memory=True), training=True)
        if on_gpu:
            loader.read_for(gpu, copies=True)
            assert isinstance(loader._reader.dataset.dataset, OnDevice)
        return list(loader)

    batches, expected = read(True), read(False)
    assert len(batches) == 7 - start and torch.equal(data.inputs, images)
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)


def test_noise_images_from_a_gpu_equal_those_from_the_host(gpu, monkeypatch):
    monkeypatch.setattr("data_modules.synthetic_images.POOL_SIZE", 16)
    data = TINY(count=50).load()["train"]
    indices = Indices([0, 15, 16, 49, 17])
    torch.testing.assert_close(data.on_device(gpu).__getitems__(indices), data.__getitems__(indices), rtol=0, atol=0)


def test_data_stays_on_the_host_if_it_is_large_or_if_only_the_processor_can_read_it(gpu):
    inputs = torch.zeros(125)  # 500 bytes, as the targets
    assert InMemory(inputs, inputs).on_device(gpu) and Mixing(inputs, inputs).on_device(gpu) is None
    assert InMemory(inputs, inputs, lambda inputs, keys: inputs).on_device(gpu) is None
    assert InMemory(torch.zeros(126), torch.zeros(126)).on_device(gpu) is None


@pytest.mark.parametrize(("device", "pins"), [("auto", True), ("cpu", False)])
def test_a_data_module_with_device_cpu_does_not_use_the_memory_of_the_gpu(monkeypatch, device, pins):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = Toy(count=8, device=device)
    module.setup("fit")
    assert module.train_dataloader().pin_memory == pins


@pytest.fixture(params=[1, 2, 3, 64])
def threads(request):
    with restore_process_state():
        torch.set_num_threads(request.param)
        yield request.param


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, 2 * ROWS, 10 * ROWS + 7])
def test_row_blocks_cover_every_row_once(threads, rows):
    blocks, workers = [], set()

    def work(block):
        blocks.append((block.start, block.stop))
        workers.add(threading.current_thread())

    in_row_blocks(work, rows)
    blocks.sort()
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])] and blocks[-1][1] == rows
    assert len(blocks) == max(1, min(threads, MAX_THREADS, rows // ROWS))
    assert threading.current_thread() in workers


def run_in_child(queue):
    torch.set_num_threads(2)
    starts = []
    in_row_blocks(lambda block: starts.append(block.start), 2 * ROWS)
    queue.put(sorted(starts))


def test_a_forked_process_creates_its_own_threads():
    parts._thread_pool().submit(int).result()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=run_in_child, args=(queue,), daemon=True)
    process.start()
    try:
        assert queue.get(timeout=30) == [0, ROWS]
    finally:
        process.kill()
        process.join()
        process.close()


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


def test_neither_the_number_of_threads_nor_the_memory_layout_changes_the_result():
    transform = ImageTransform((120.0,), (60.0,), padding=1, flip=True)
    images = torch.randint(0, 256, (3 * ROWS, 1, 4, 4), dtype=torch.uint8)
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
