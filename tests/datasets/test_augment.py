"""Augmentation of images: the pixels and shares are torchvision's, the same for any part of a batch and on a device."""

import dataclasses

import numpy as np
import pytest
from images import scene
from PIL import Image
from ranks import needs_torch

from hvdtrain.datasets import operations
from hvdtrain.datasets.augment import DRAWS, WHOLE, Augmenter

PLAIN = Augmenter(8, 10, (124, 116, 104), 0.0, 0.0, 0.0)
BOTH = dataclasses.replace(PLAIN, mixup=0.4, cutmix=1.0, erasing=0.5)
ALL = dataclasses.replace(BOTH, policy="randaugment")


def batch(examples=32, side=40):
    random = np.random.default_rng(0)
    images = random.integers(256, size=(examples, side, side + 8, 3), dtype=np.uint8)
    draws = random.random((examples, 8 + DRAWS), dtype=np.float32)
    return images, random.integers(10, size=examples), draws


def augmented(augmenter, images, labels, draws):
    x = images.copy()
    augmenter.images(x, draws)
    return x, augmenter.targets(labels, draws, *x.shape[1:3])


def test_parts_of_a_batch_are_augmented_as_the_whole():
    images, labels, draws = batch()
    x, y = augmented(ALL, images, labels, draws)
    for part in (slice(0, 16), slice(16, 32), slice(10, 12)):
        for ours, whole in zip(augmented(ALL, images[part], labels[part], draws[part]), (x, y), strict=True):
            np.testing.assert_array_equal(ours, whole[part])
    assert y.shape == (32, 10) and y.dtype == np.float32
    np.testing.assert_array_equal(y.sum(1), 1)
    assert (x != images).any(axis=(1, 2, 3)).all()


def test_draws_of_the_set_alone_and_none_leave_images_as_they_are():
    images, labels, draws = batch()
    for without in (draws[:, :8], None):
        x, y = augmented(ALL, images, labels, without)
        np.testing.assert_array_equal(x, images)
        np.testing.assert_array_equal(y, labels)


@needs_torch
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_pairs_are_mixed_as_by_torchvision(kind):
    import torch
    from torchvision.transforms import v2

    images, labels, draws = batch()
    augmenter = dataclasses.replace(PLAIN, **{kind: 1.0})
    x, y = augmented(augmenter, images, labels, draws)
    for pair, (top, left, bottom, right, _, outside, share) in enumerate(augmenter.mixed(draws, 40, 48).tolist()):
        at = slice(2 * pair, 2 * pair + 2)
        theirs = (v2.MixUp if kind == "mixup" else v2.CutMix)(num_classes=10)
        given = torch.from_numpy(images[at]).permute(0, 3, 1, 2).float(), torch.from_numpy(labels[at])
        params = {"lam": outside / WHOLE, "box": (left, top, right, bottom), "lam_adjusted": share / WHOLE}
        params |= {"labels": given[1], "batch_size": 2}
        expected = [theirs.transform(one, params) for one in given]
        assert np.abs(x[at] - expected[0].permute(0, 2, 3, 1).numpy()).max() <= (0.501 if kind == "mixup" else 0)
        np.testing.assert_allclose(y[at], expected[1].numpy(), atol=1e-6)
        if kind == "cutmix":
            assert abs(share / WHOLE - (1 - (bottom - top) * (right - left) / (40 * 48))) <= 1 / WHOLE


def test_shares_and_boxes_are_drawn_as_published():
    draws = np.random.default_rng(1).random((8000, 8 + DRAWS), dtype=np.float32)
    mixed = BOTH.mixed(draws, 64, 64)
    cut = mixed[:, 5] == WHOLE
    assert abs(cut.mean() - 0.5) < 0.03
    shares = mixed[~cut, 5] / WHOLE  # of Beta(.4, .4): the mean 1/2, the variance 1 / (4 (2 * .4 + 1))
    assert abs(shares.mean() - 0.5) < 0.03 and abs(shares.var() - 1 / 7.2) < 0.01
    boxes = BOTH.erased(draws, 64, 64)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 64**2
    assert abs((areas > 0).mean() - 0.5) < 0.02
    assert 0.015 < areas[areas > 0].min() < 0.03 and 0.3 < areas.max() < 0.34
    assert (boxes >= 0).all() and (boxes <= 64).all()
    # What one of them draws does not depend on the others.
    np.testing.assert_array_equal(boxes, dataclasses.replace(PLAIN, erasing=0.5).erased(draws, 64, 64))


def test_erased_boxes_have_the_mean_colour():
    images, labels, draws = batch()
    augmenter = dataclasses.replace(PLAIN, erasing=1.0)
    x, y = augmented(augmenter, images, labels, draws)
    np.testing.assert_array_equal(y, labels)
    for image, before, (top, left, bottom, right) in zip(x, images, augmenter.erased(draws, 40, 48), strict=True):
        assert (image[top:bottom, left:right] == PLAIN.fill).all()
        image[top:bottom, left:right] = before[top:bottom, left:right]
        np.testing.assert_array_equal(image, before)


@needs_torch
def test_a_device_gives_the_same_bits():
    import torch

    from hvdtrain.torch.data.held import augmented as on_device

    images, labels, draws = batch()
    pair = torch.from_numpy(images.copy()), torch.from_numpy(labels)
    requests = [(np.arange(32), draws)]
    ((x, y),) = on_device(iter([pair]), requests, BOTH, torch.device("cpu"), [40, 48])
    for ours, expected in zip((x, y), augmented(BOTH, images, labels, draws), strict=True):
        np.testing.assert_array_equal(ours.numpy(), expected)
        assert ours.numpy().dtype == expected.dtype


@needs_torch
@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_operations_are_those_of_torchvision(policy):
    """Of a smooth picture and of noise, at every magnitude and sign, to the bit."""
    import torch
    from torchvision.transforms import v2

    theirs = v2.RandAugment() if policy == "randaugment" else v2.TrivialAugmentWide()
    assert list(theirs._AUGMENTATION_SPACE) == list(operations.NAMES)
    noise = np.random.default_rng(2).integers(256, size=(70, 90, 3), dtype=np.uint8)
    for image in (scene(90, 70), Image.fromarray(noise)):
        for name, (magnitudes, signed) in theirs._AUGMENTATION_SPACE.items():
            assert signed == (name in operations.SIGNED)
            values = magnitudes(31, image.height, image.width)
            for magnitude in range(0, 31, 3):
                for sign in (1, -1)[: 1 + signed]:
                    value = sign * operations.value_of(policy, name, magnitude, *image.size)
                    given = 0.0 if values is None else sign * float(values[magnitude])
                    expected = theirs._apply_image_or_video_transform(
                        image, name, given, v2.InterpolationMode.NEAREST, {torch.Tensor: None, Image.Image: None}
                    )
                    ours = np.asarray(operations.OPERATIONS[name](image, value)).astype(int)
                    unlike = np.abs(ours - np.asarray(expected)).max(axis=2)
                    assert not unlike.any(), (name, magnitude, sign, (unlike > 0).sum(), unlike.max())
