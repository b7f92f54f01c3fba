import pytest
import torch

from data_modules.toy import Toy


def set_up(module):
    module.setup("fit")
    return module


def rows(dataset):
    return {tuple(pair.flatten().tolist()) for pair in dataset.inputs}


def test_the_data_has_the_tutorials_shape_and_splits_do_not_overlap():
    splits = set_up(Toy()).splits
    assert len(splits["train"]) == 2048 and splits["train"].inputs.shape == (2048, 20)
    assert not rows(splits["train"]) & rows(splits["val"]) and not rows(splits["val"]) & rows(splits["test"])


def test_inputs_and_targets_are_uniform_random_numbers_from_the_seed():
    first, same_seed, other_seed = (Toy(count=40, data_seed=seed).load() for seed in (0, 0, 1))
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(first["train"].inputs, torch.rand(40, 20, generator=generator))
    assert torch.equal(first["train"].targets, torch.rand(40, 1, generator=generator))
    for split, data in first.items():
        assert torch.equal(data.inputs, same_seed[split].inputs) and torch.equal(data.targets, same_seed[split].targets)
        assert not torch.equal(data.inputs, other_seed[split].inputs)


@pytest.mark.parametrize(("count", "held_out"), [(1, 1), (7, 1), (8, 1), (16, 2), (2048, 256)])
def test_val_and_test_have_an_eighth_of_the_count_and_at_least_one_sample(count, held_out):
    splits = Toy(count=count).load()
    assert {split: len(data) for split, data in splits.items()} == {"train": count, "val": held_out, "test": held_out}


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ValueError, match=f"^--data.count is {count}; it must be 1 or more$"):
        Toy(count=count)
