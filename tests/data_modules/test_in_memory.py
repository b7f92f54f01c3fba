from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from data_modules.digits import Digits
from data_modules.in_memory import InMemory, InMemoryData, split_indices
from data_modules.synthetic_images import SyntheticImages
from data_modules.toy import Toy
from rankzero.sampling.plan import SamplingPlan


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


def test_a_data_set_that_mixes_samples_is_read_batch_by_batch():
    class Mixing(InMemory):
        def __getitems__(self, indices):
            inputs, targets = super().__getitems__(indices)
            return inputs.flip(0), targets

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


def test_a_data_module_without_load_names_the_missing_method():
    class Empty(InMemoryData): ...

    with pytest.raises(TypeError, match="abstract class Empty .*load"):
        Empty()
