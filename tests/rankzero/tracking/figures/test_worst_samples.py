import pytest
import torch
from torch.nn import functional as F

from rankzero.sampling.plan import SamplingPlan
from rankzero.tracking.figures.class_counts import IGNORED_TARGET
from rankzero.tracking.figures.worst_samples import MAX_SAMPLES, WorstSamples, downscaled, stored_shape
from rankzero.training.strategies import OneProcess

COUNT, CLASSES = 70, 5


def data():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(COUNT, CLASSES, generator=generator)
    images = torch.arange(float(COUNT))[:, None, None, None].expand(COUNT, 1, 2, 3)
    return logits, torch.randint(CLASSES, (COUNT,), generator=generator), images


def gather(worst):
    return worst.gather(OneProcess(SamplingPlan(), device="cpu"), 0, worst.shape)


def test_the_samples_with_the_largest_losses_are_kept():
    worst, (logits, targets, images) = WorstSamples(), data()
    for part in torch.arange(COUNT).split(9):
        worst.add(logits[part], targets[part], images[part])
    losses = F.cross_entropy(logits, targets, reduction="none")
    expected = losses.argsort(descending=True)[:MAX_SAMPLES]
    found = gather(worst)
    assert [int(sample.image[0, 0, 0]) for sample in found] == expected.tolist()
    assert [sample.loss for sample in found] == pytest.approx(losses[expected].tolist())
    assert [sample.true for sample in found] == targets[expected].tolist()
    assert [sample.predicted for sample in found] == logits.argmax(1)[expected].tolist()


def test_a_loss_that_is_not_a_number_is_the_largest_and_ignored_samples_are_not_kept():
    worst, (logits, _, images) = WorstSamples(), data()
    logits[2] = torch.nan
    worst.add(logits[:4], torch.tensor([0, IGNORED_TARGET, 1, 2]), images[:4])
    kept = [int(sample.image[0, 0, 0]) for sample in gather(worst)]
    assert kept[0] == 2 and sorted(kept) == [0, 2, 3]


@pytest.mark.parametrize("second", [None, torch.zeros(COUNT, 1, 4, 4)])
def test_images_of_different_shapes_are_not_kept(second):
    worst, (logits, targets, images) = WorstSamples(), data()
    for added in (images, second, images):
        worst.add(logits, targets, added)
    assert worst.shape == (0, 0, 0) and not worst.samples


def test_large_images_are_downscaled():
    images = torch.rand(2, 3, 480, 320)
    assert stored_shape(images) == (3, 96, 64) == tuple(downscaled(images).shape[1:])
    torch.testing.assert_close(downscaled(images).mean(), images.mean())
    assert tuple(downscaled(torch.zeros(1, 1, 5000, 2, dtype=torch.uint8)).shape) == (1, 1, 96, 1)
