"""What every data set promises, and the three that need no files."""

import dataclasses
import hashlib
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from refusals import refusal

from hvdtrain import datasets
from hvdtrain.core import recipe
from hvdtrain.errors import DataError, RecipeError
from hvdtrain.run.options import layout_of
from hvdtrain.tools import plan

SMALL = {"image_size": 8, "classes": 5, "examples": 300}
IN_MEMORY = ["linear", "digits", "synthetic"]


def digest(split: datasets.Split) -> str:
    indices = np.arange(0, len(split), 7)
    draws = np.random.default_rng(5).random((len(indices), datasets.DRAWS), dtype=np.float32)
    x, y = split.read(indices, draws)
    return hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()


@pytest.mark.parametrize("name", IN_MEMORY)
def test_read_gives_the_promised_types_and_shapes(name):
    dataset = datasets.load(name, **SMALL)
    assert dataset.name == name
    for split in (dataset.train, dataset.valid):
        x, y = split.read(np.array([3, 0, len(split) - 1]), None)
        assert x.shape == (3, *dataset.sample_shape)
        if dataset.classes is None:
            assert (x.dtype, y.dtype, y.shape) == (np.float32, np.float32, (3, 1))
            assert dataset.mean == dataset.std == ()
        else:
            assert (x.dtype, y.dtype, y.shape) == (np.uint8, np.int64, (3,))
            assert len(dataset.mean) == len(dataset.std) == 3
            assert 0 <= y.min() <= y.max() < dataset.classes


DIGESTS = {"linear": "11997b1875cb2e4a", "digits": "d9d693d83aedb3c4", "synthetic": "e63e8622742bafb1"}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_the_same_bytes_are_read_everywhere(name):
    """In any batch, from a pickled copy, in a thread, on every machine, and after a reader has changed its arrays."""
    split = datasets.load(name, **SMALL).train
    draws = np.random.default_rng(0).random((4, datasets.DRAWS), dtype=np.float32)
    indices = np.array([7, 2, 250, 2])
    x, y = split.read(indices, draws)
    for k in range(4):
        alone_x, alone_y = split.read(indices[k : k + 1], draws[k : k + 1])
        np.testing.assert_array_equal(alone_x[0], x[k])
        np.testing.assert_array_equal(alone_y[0], y[k])
    x[:], y[:] = 0, 0
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(digest, [split, pickle.loads(pickle.dumps(split))] * 2))
    assert [each[:16] for each in found] == [DIGESTS[name]] * 4


@pytest.mark.parametrize(("name", "other"), [("linear", {"seed": 1}), ("synthetic", {"examples": 301}), ("digits", {})])
def test_contents_say_what_is_read(name, other):
    dataset, again = datasets.load(name, **SMALL), datasets.load(name, **SMALL)
    contents = json.loads(json.dumps(dataset.contents()))
    assert contents == again.contents()
    counts = (contents["training examples"], contents["validation examples"], contents["classes"])
    assert counts == (len(dataset.train), len(dataset.valid), dataset.classes)
    changed = datasets.load(name, **{**SMALL, **other}) if other else dataclasses.replace(again, train=again.valid)
    assert changed.contents()["training list"] != contents["training list"]
    assert changed.contents()["validation list"] == contents["validation list"] or name != "digits"


def test_a_split_without_a_digest_has_none_in_the_contents():
    class Own:
        def __len__(self):
            return 3

    dataset = datasets.Dataset("own", Own(), Own(), 2, (), (), (), names=("a", "b"))
    assert dataset.contents() == {
        "training examples": 3,
        "validation examples": 3,
        "classes": 2,
        "class names": ["a", "b"],
    }


def test_linear_is_a_line_with_uniform_noise():
    dataset = datasets.load("linear")
    for split in (dataset.train, dataset.valid):
        x, y = split.read(np.arange(len(split)), None)
        noise = y - 2 * x
        assert len(split) == 1000
        for values in (x, noise):
            assert -0.5 <= values.min() < -0.49
            assert 0.49 < values.max() <= 0.5
        slope, _ = np.polyfit(x[:, 0], y[:, 0], 1)
        assert slope == pytest.approx(2, abs=0.1)
        assert noise.var() == pytest.approx(1 / 12, rel=0.05)


def test_linear_validates_on_other_points_and_another_seed_gives_others():
    dataset, other = datasets.load("linear"), datasets.load("linear", seed=1)
    everything = np.arange(1000)
    points = [split.read(everything, None)[0] for split in (dataset.train, dataset.valid, other.train, other.valid)]
    assert len(np.unique(np.concatenate(points))) > 3990


def test_digits_are_split_evenly_without_overlap():
    dataset = datasets.load("digits")
    x, y = dataset.train.read(np.arange(1437), None)
    valid_x, valid_y = dataset.valid.read(np.arange(360), None)
    assert (len(dataset.train), len(dataset.valid)) == (1437, 360)
    assert np.bincount(valid_y).tolist() == [36] * 10
    assert np.bincount(y).min() >= 138
    assert not {image.tobytes() for image in x} & {image.tobytes() for image in valid_x}

    assert (x.min(), x.max()) == (0, 255)
    assert (x[..., :1] == x).all()


def test_synthetic_follows_its_sizes():
    dataset = datasets.load("synthetic", image_size=16, classes=7, examples=12345)
    assert (len(dataset.train), len(dataset.valid), dataset.classes) == (12345, 1234, 7)
    assert dataset.sample_shape == (16, 16, 3)


@pytest.mark.parametrize(("name", "count", "error"), [("digits", 1437, 1e-6), ("synthetic", 256, 2e-3)])
def test_mean_and_deviation_are_those_of_the_images(name, count, error):
    dataset = datasets.load(name)
    pixels = dataset.train.read(np.arange(count), None)[0] / 255
    assert dataset.mean == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=error)
    assert dataset.std == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=error)


def test_imagenet_needs_a_folder():
    message = "imagenet needs a data_dir with the folders train/<class> and val/<class>."
    assert refusal(DataError, datasets.load, "imagenet") == message


def test_importing_is_light(python):
    code = "import sys, hvdtrain.datasets; print(*sorted({'sklearn', 'PIL', 'scipy', 'ssl'} & set(sys.modules)))"
    assert python("-c", code).stdout == "\n"


def test_another_row_is_found_everywhere(tmp_path, monkeypatch, capsys):
    row = datasets.Row("hvdtrain.datasets.small:digits", ("data_dir",), False, (4_000, 500, 7), side="train_crop")
    monkeypatch.setitem(datasets.DATASETS, "stars", row)
    chosen = recipe.load("digits", {"dataset": "stars"})
    assert len(datasets.load("stars", seed=1).train) == 1437
    assert "data_dir" not in layout_of(chosen, "torch").hidden
    assert {"train_crop", "data_on_device"} <= set(layout_of(chosen, "torch").hidden)
    assert refusal(RecipeError, recipe.load, "digits", {"dataset": "starz"}).endswith("Did you mean stars?")
    assert "data set in memory, stars is" in refusal(
        RecipeError, recipe.load, "digits", {"dataset": "stars", "data_on_device": True}
    )
    assert plan.main(["digits", "--dataset", "stars", "--train-crop", "16", "--data-dir", str(tmp_path / "no")]) == 0
    assert "4,000 examples to train, 500 to validate, 7 classes" in capsys.readouterr().out
