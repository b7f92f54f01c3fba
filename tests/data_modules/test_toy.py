import torch

from data_modules.toy import Toy


def rows(dataset):
    return {tuple(pair.flatten().tolist()) for pair in dataset.inputs}


def test_the_data_has_the_tutorials_shape_and_splits_do_not_overlap():
    splits = Toy().load()
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
