import torch

from data_modules.toy import Toy


def rows(dataset):
    return {tuple(pair.flatten().tolist()) for pair in dataset.inputs}


def test_the_data_are_uniform_random_numbers_with_the_tutorials_shape_and_splits_do_not_overlap():
    splits = Toy().load()
    assert len(splits["train"]) == 2048 and splits["train"].inputs.shape == (2048, 20)
    assert not rows(splits["train"]) & rows(splits["val"]) and not rows(splits["val"]) & rows(splits["test"])
    train, generator = Toy(count=40, data_seed=0).load()["train"], torch.Generator().manual_seed(0)
    assert torch.equal(train.inputs, torch.rand(40, 20, generator=generator))
    assert torch.equal(train.targets, torch.rand(40, 1, generator=generator))
